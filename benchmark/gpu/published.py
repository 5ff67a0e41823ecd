"""Committed results from the cells of a campaign, as `benchmark/make_tables.py` reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.gpu.tables import all_tables, served_results
from benchmark.harness.cells import OK, Cell, latest, on_gpu, read
from benchmark.harness.report import Table

STEPS = (
    *("device", "drift", "restore", "capture", "kernels", "checked", "smoke", "throughput"),
    "returning",
)
NAMES = {"checked": "checks", "smoke": "checks"}


def publish(cells: Path, folder: Path) -> list[Path]:
    """Write one result per kind of measurement; returns their paths.

    Files are named `gpu-*.json`, and `rehearsal-*.json` for cells of a machine without a GPU.
    """
    found = {key: cell for key, cell in latest(read(cells)).items() if cell["status"] == OK}
    prefix = "gpu" if all(map(on_gpu, found.values())) else "rehearsal"
    results: dict[str, dict[str, Any]] = dict(served_results(found))
    tables = all_tables(found)
    for step in STEPS:
        chosen = [cell for cell in found.values() if cell["step"] == step]
        if chosen:
            results[step] = _result(step, chosen, tables.get(NAMES.get(step, step)))
    written = []
    for name, result in results.items():
        path = folder / f"{prefix}-{name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        written.append(path)
    return written


def _result(step: str, cells: Sequence[Cell], table: Table | None) -> dict[str, Any]:
    tables = {}
    if table is not None:
        tables["rows"] = {"columns": list(table.head), "rows": [list(row) for row in table.rows]}
    return {"experiment": step, "tables": tables, "cells": list(cells)}
