"""Fixtures of the I/O process's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hc.store.process import supervisor as io_supervisor
from sglang_hc.store.process.opening import Io, open_io
from support.io_process import MEMORY, close, disk_spec


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_supervisor, "FIRST_BACKOFF_S", 0.05)


@pytest.fixture
def io(tmp_path: Path) -> Iterator[Io]:
    io = open_io("process", MEMORY, disk_spec(tmp_path / "d"))
    yield io
    close(io)
