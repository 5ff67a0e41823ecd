"""Measurements that survive a crash: each is one line of JSON, on disk the moment it is measured.

A line ("cell") has: `step` (the campaign's step, or the script), `key` (names the measurement, the
same in every run), `status` ("ok", "failed" or "left out"), `values`, `seconds` it took, `at`,
`commit`, `device`, `versions` and the `command` that measures it again.

A process may be killed in the middle of a line: readers skip incomplete lines, and the next
writer begins a new one. Of several lines with one key the last one counts, but a failure never
replaces a measurement.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmark.harness import machine

OK, FAILED, LEFT_OUT = "ok", "failed", "left out"
MAX_LINE = 64 << 10
"""Bytes of a line at most, so that a thousand cells stay small enough to be carried around."""

LOG_TAIL = 4000
"""Characters of a log that stand in a failed cell."""

NO_GPU = ", no GPU"
"""Ends the `device` of a cell that was measured without one."""

Cell = dict[str, Any]


class CellFile:
    """Appends cells of one step to a file. Measure only what `has` does not report."""

    def __init__(self, path: Path | None, step: str, command: str | None = None) -> None:
        """path: None keeps nothing. command: what to type to get these cells again; by default
        this process's own."""
        self.path = path
        self.step = step
        self._command = command or own_command()
        kept = latest(read(path)) if path is not None else {}
        self._known = {key for key, cell in kept.items() if cell["status"] == OK}

    def has(self, key: str) -> bool:
        """A measurement with this key is in the file."""
        return key in self._known

    def add(self, key: str, values: dict[str, Any], seconds: float, status: str = OK) -> None:
        """Append one cell. Raises ValueError for a line above MAX_LINE."""
        cell = {
            "step": self.step,
            "key": key,
            "status": status,
            "values": rounded(values),
            "seconds": round(seconds, 3),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": self._command,
            **_where(),
        }
        if self.path is not None:
            append(self.path, cell)
        if status == OK:
            self._known.add(key)

    def failed(self, key: str, reason: str, log: str, seconds: float) -> None:
        """Append a cell that says why there is no measurement. log: its end is kept."""
        values = {"reason": reason[-LOG_TAIL:], "log": log[-LOG_TAIL:]}
        self.add(key, values, seconds, FAILED)


def append(path: Path, cell: Cell) -> None:
    """Write one whole line behind whatever the file ends with, and wait until it is on disk."""
    line = json.dumps(cell, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise ValueError(f"the cell {cell['key']} has {len(line)} bytes, at most {MAX_LINE} fit")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Cell]:
    """All whole cells of a file, in the order they were measured. A missing file has none."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    cells = []
    for line in lines:
        try:
            cell = json.loads(line)
        except ValueError:
            continue  # the writer was killed in the middle of it
        if isinstance(cell, dict) and {"step", "key", "status", "values"} <= cell.keys():
            cells.append(cell)
    return cells


def latest(cells: Iterable[Cell]) -> dict[str, Cell]:
    """The cell that counts for each key, in the order in which keys first appeared."""
    found: dict[str, Cell] = {}
    for cell in cells:
        old = found.get(cell["key"])
        if old is None or old["status"] != OK or cell["status"] == OK:
            found[cell["key"]] = cell
    return found


def on_gpu(cell: Cell) -> bool:
    """The cell was measured on a machine with a GPU."""
    return not str(cell["device"]).endswith(NO_GPU)


def own_command() -> str:
    """What was typed to start this process, without the place where its cells go."""
    words, skip = [], False
    for word in sys.argv[1:]:
        if skip or word == "--cells":
            skip = not skip
            continue
        words.append(word)
    return machine.command(words)


def rounded(value: Any) -> Any:
    """The same JSON value with six significant digits in every float."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


@functools.cache
def _where() -> dict[str, Any]:
    """Commit, device and versions; of this process, so they are asked for once."""
    found = machine.describe()
    device = ", ".join(found["gpus"]) or f"{found['cpu']}, {found['cores']} cores{NO_GPU}"
    versions = {**found["versions"], "python": found["python"], "os": found["os"]}
    return {"commit": found["commit"], "device": device, "versions": versions}
