"""Fixtures of all that opens disk stores: where they lie, and that none stays open."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sglang_hc.store.disk import DiskStore
from sglang_hc.store.disk.directory import Directory
from support.disk_store import MEMORY, Faults


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one, for tests that need no real disk."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Directories that a test leaves open are closed at its end."""
    left: set[Directory] = set()
    make, close = DiskStore.__init__, Directory.close

    def note(store: DiskStore, *args: Any) -> None:
        make(store, *args)
        left.update(store.directories)

    def close_noted(directory: Directory) -> None:
        left.discard(directory)
        close(directory)

    with (
        mock.patch.object(DiskStore, "__init__", note),
        mock.patch.object(Directory, "close", close_noted),
    ):
        yield
    for directory in left:
        directory.close()
