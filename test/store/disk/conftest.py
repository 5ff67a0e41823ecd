"""Fixtures of the disk store's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clock import Clock
from support.disk_filling import START
from support.disk_store import MEMORY


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one, for tests that need no real disk."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def clock() -> Clock:
    return Clock(START)
