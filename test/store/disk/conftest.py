"""Fixtures of the disk store's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hc.store.disk import DiskStore
from support.clock import Clock
from support.disk_filling import START
from support.disk_store import FILE, open_store
from support.scratch import faults, nothing_stays_open, scratch

__all__ = ["faults", "nothing_stays_open", "scratch"]


@pytest.fixture
def clock() -> Clock:
    return Clock(START)


@pytest.fixture
def store(scratch: Path, clock: Clock) -> DiskStore:
    """A store with room for 40 blocks."""
    return open_store(scratch, size=40 * FILE, clock=clock)
