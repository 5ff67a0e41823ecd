"""Fixtures of the remote store's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.remote import store as store_module
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


class _AsMany:
    """Stands for CallSize."""

    def __init__(self, most: int) -> None:
        self.blocks = most

    def observe(self, blocks: int, seconds: float) -> None:
        pass


@pytest.fixture
def large_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call reads what is wanted, however long that takes."""
    monkeypatch.setattr(store_module, "CallSize", _AsMany)


@pytest.fixture
def io(store: FakeStore, pool: HostPool, clock: Clock) -> Iterator[KnownBlocks]:
    io = make_blocks(store, pool, clock)
    yield io
    store.open.set()
    io.close()
