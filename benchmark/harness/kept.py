"""Runs of a benchmark kept as cells (`--cells FILE`): a benchmark that was cut off goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.harness import machine, results
from benchmark.harness.cells import CellFile
from benchmark.harness.metrics import Groups

if TYPE_CHECKING:
    from benchmark.harness.arms import Arm
    from benchmark.harness.points import Cell, Point


class KeptRuns:
    """Appends every run the moment it is over; says which ones the file has already."""

    def __init__(
        self, path: Path, experiment: str, model: str, settings: dict[str, Any], names: Groups
    ) -> None:
        """model: name of the model for keys. settings, names: as in `results.build`."""
        self._file = CellFile(path, experiment)
        self._model, self._settings, self._names = model, settings, names
        self._machine = machine.describe()
        self._began = time.monotonic()

    def has(self, arm: str, point: str, repeat: int) -> bool:
        return self._file.has(self._key(arm, point, repeat))

    def keep(self, cell: Cell, point: Point, arm: Arm, start_s: float) -> None:
        """One run. start_s: how long its server took to start. A run without any answer is kept as
        a failure."""
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        key = self._key(cell.arm, cell.point, cell.repeat)
        if not cell.run.measured:
            reason = cell.run.failed[0].error if cell.run.failed else "nothing was sent"
            self._file.failed(key, f"no request succeeded: {reason}", "", seconds)
            return
        values = {
            "model": self._model,
            "arm": {"name": arm.name, "command": arm.command, "start_s": [start_s]},
            "point": results.point_json(point),
            "run": results.run_json(cell, point, self._names),
            "settings": self._settings,
            "machine": self._machine,
        }
        self._file.add(key, values, seconds)

    def _key(self, arm: str, point: str, repeat: int) -> str:
        return f"{self._file.step}/{self._model}/{arm}/{point}/repeat {repeat}"
