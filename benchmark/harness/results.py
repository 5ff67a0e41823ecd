"""The result of one benchmark as JSON: everything that tables, plots and reports are made from."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.harness import machine, metrics
from benchmark.harness.arms import HICACHE, Arm
from benchmark.harness.cells import rounded
from benchmark.harness.compare import Agreement
from benchmark.harness.metrics import Groups
from benchmark.harness.points import Cell, Point
from sglang_hc.tools.workloads.sessions import Workload

SCHEMA = 1


def build(
    experiment: str,
    *,
    arms: Sequence[Arm],
    skipped: Sequence[str],
    points: Sequence[Point],
    cells: Sequence[Cell],
    agreements: Sequence[Agreement],
    start_s: dict[str, list[float]],
    settings: dict[str, Any],
    names: Groups,
) -> dict[str, Any]:
    """JSON-ready result. The first arm is the reference of ratios and comparisons.

    Ratios are given against HiCache too, when it is an arm.
    """
    by_name = {point.name: point for point in points}
    runs = [run_json(cell, by_name[cell.point], names) for cell in cells]
    result = from_runs(
        experiment,
        runs,
        arms=[
            {"name": arm.name, "command": arm.command, "start_s": start_s.get(arm.name, [])}
            for arm in arms
        ],
        skipped=skipped,
        points=[point_json(point) for point in points],
        agreement=[agreement.to_json() for agreement in agreements],
        settings=settings,
        command=machine.command(),
        measured_on=machine.describe(),
    )
    return {**result, "conversation": _conversation(points[0].workload(0), cells)}


def from_runs(
    experiment: str,
    runs: Sequence[dict[str, Any]],
    *,
    arms: Sequence[dict[str, Any]],
    points: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    command: str,
    measured_on: dict[str, Any],
    skipped: Sequence[str] = (),
    agreement: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """A result whose parts are JSON already, as they stand in cells; see `build`."""
    reference = arms[0]["name"]
    ratios = metrics.ratio_rows(runs, reference)
    for arm in arms[1:]:
        if arm["name"] in HICACHE:
            rows = metrics.ratio_rows(runs, arm["name"])
            ratios += [row for row in rows if row["arm"] not in (reference, *HICACHE)]
    return {
        "schema": SCHEMA,
        "experiment": experiment,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command,
        "machine": measured_on,
        "settings": settings,
        "reference": reference,
        "arms": list(arms),
        "skipped": list(skipped),
        "points": list(points),
        "runs": list(runs),
        "ratios": ratios,
        "losses": metrics.losses(ratios),
        "agreement": list(agreement),
        "conversation": [],
    }


def _conversation(workload: Workload, cells: Sequence[Cell]) -> list[dict[str, str]]:
    """What the last arm said in the first conversation; empty where prompts are not text to read.

    The questions are as the file has them, without the document.
    """
    if workload.sessions[0].end_id is None:
        return []
    return [
        {"question": record.label, "answer": record.reply.text}
        for record in sorted(cells[-1].run.measured, key=lambda record: record.turn)
        if record.session == 0
    ]


def point_json(point: Point) -> dict[str, Any]:
    """One object of `points`."""
    workload = point.workload(0)
    return {
        "name": point.name,
        "value": point.value,
        "trace": workload.name,
        "requests": workload.num_turns,
        "notes": list(workload.notes),
    }


def run_json(cell: Cell, point: Point, names: Groups) -> dict[str, Any]:
    """One object of `runs`."""
    return {
        "arm": cell.arm,
        "point": cell.point,
        "value": point.value,
        "repeat": cell.repeat,
        "load_average": round(cell.load, 2),
        "flushed": cell.flushed,
        "summary": metrics.summary(cell.run, point.rate or 0.0),
        "groups": metrics.groups(cell.run, names),
    }


def write(result: dict[str, Any], cells: Sequence[Cell], output: Path) -> None:
    """Write result.json and requests.jsonl."""
    (output / "result.json").write_text(json.dumps(rounded(result), indent=1) + "\n")
    with open(output / "requests.jsonl", "w", encoding="utf-8") as file:
        for cell in cells:
            place = {"arm": cell.arm, "point": cell.point, "repeat": cell.repeat}
            for record in cell.run.records:
                file.write(json.dumps({**place, **record.to_json()}) + "\n")
