"""Fixtures of the remote store's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.remote import RemoteBlocks
from support.clock import Clock
from support.remote import FakeStore, make_blocks, make_pool


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def pool() -> HostPool:
    return make_pool()


@pytest.fixture
def io(store: FakeStore, pool: HostPool, clock: Clock) -> Iterator[RemoteBlocks]:
    io = make_blocks(store, pool, clock)
    yield io
    store.open.set()
    io.close()
