"""Who touched which bytes last: finds accesses that no order forbids to happen at once.

Each byte range of interest has a shadow: per cell the last write, and per stream the last read
since (as in FastTrack and ThreadSanitizer). An access conflicts with an earlier one when one of
them writes and the earlier does not come before it by the vector clocks (`happens_before.py`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.happens_before import ACTORS, Use

Cells = Any
"""What numpy takes as an index into the cells of a region."""


@dataclass(frozen=True)
class Op:
    """One access, for a report. places: who asked for it, the nearest first."""

    what: str
    stream: str
    places: tuple[str, ...]

    @property
    def ours(self) -> bool:
        """The nearest of SGLang's and this project's functions is this project's."""
        return bool(self.places) and self.places[0].startswith("sglang_hc/")

    def __str__(self) -> str:
        return f"{self.what} on {self.stream}\n      " + "\n      ".join(self.places)


@dataclass(frozen=True)
class Race:
    """Two accesses to the same cells, `second` submitted later, in no order."""

    region: str
    kind: str
    first: Op
    second: Op

    def __str__(self) -> str:
        return f"{self.region}: {self.kind}\n    {self.first}\n    {self.second}"

    @property
    def sites(self) -> tuple[str, ...]:
        """What makes two reports the same mistake."""
        return (self.region, self.kind, *self.first.places[:2], *self.second.places[:2])


class Shadow:
    """The history of a byte range. One cell for all of it, or one for every `cell` bytes."""

    def __init__(self, name: str, base: int, size: int, cell: int | None = None) -> None:
        self.name, self.base, self.size = name, base, size
        self.cell = cell or max(size, 1)
        cells = -(-max(size, 1) // self.cell)
        self._writer = np.full(cells, -1, dtype=np.int16)
        self._written = np.zeros(cells, dtype=np.int64)
        self._write_op = np.zeros(cells, dtype=np.int64)
        self._read = np.zeros((cells, ACTORS), dtype=np.int64)
        self._read_op = np.zeros((cells, ACTORS), dtype=np.int64)

    def access(self, cells: Cells, use: Use, op: int, write: bool) -> tuple[str, int] | None:
        """Take note of an access. Returns (kind, number of the earlier op) where one conflicts."""
        clock = use.actor.clock
        writer = self._writer[cells]
        found = None
        unordered = (writer >= 0) & (self._written[cells] > clock[writer])
        if unordered.any():
            kind = "written twice" if write else "read after a write"
            found = kind, int(self._write_op[cells][unordered][0])
        elif write:
            early = self._read[cells] > clock
            if early.any():
                found = "written after a read", int(self._read_op[cells][early][0])
        if write:
            self._writer[cells] = use.actor.index
            self._written[cells] = use.at
            self._write_op[cells] = op
            self._read[cells] = 0
        else:
            self._read[cells, use.actor.index] = use.at
            self._read_op[cells, use.actor.index] = op
        return found


def places(limit: int = 5) -> tuple[str, ...]:
    """Functions of SGLang and of this project that are being called, the nearest first."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < limit:
        path = frame.f_code.co_filename
        for package in ("sglang_hc", "sglang"):
            _, there, rest = path.rpartition(f"/{package}/")
            if there:
                found.append(f"{package}/{rest}:{frame.f_lineno} {frame.f_code.co_name}")
                break
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)
