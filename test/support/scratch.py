"""Fixtures of all that opens disk stores: where they lie, and that none stays open."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
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
def nothing_stays_open(scratch: Path) -> Iterator[None]:
    """What a test leaves open is closed at its end, while its files are still there."""
    left: dict[Directory, DiskStore] = {}
    make, close = DiskStore.__init__, Directory.close

    def note(store: DiskStore, *args: Any) -> None:
        make(store, *args)
        left.update(dict.fromkeys(store.directories, store))

    def close_noted(directory: Directory) -> None:
        left.pop(directory, None)
        close(directory)

    with (
        mock.patch.object(DiskStore, "__init__", note),
        mock.patch.object(Directory, "close", close_noted),
    ):
        yield
    with ExitStack() as closing:
        for directory, store in left.items():
            closing.callback(store.close_directory, directory)
