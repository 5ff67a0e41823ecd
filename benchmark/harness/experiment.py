"""From points to a finished report: what every benchmark does the same way."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmark.harness import page, plots, report, results
from benchmark.harness.arms import Arm
from benchmark.harness.client import Client, RequestFailed
from benchmark.harness.compare import Agreement, Disagreement, compare, explain
from benchmark.harness.metrics import Groups
from benchmark.harness.options import Setup
from benchmark.harness.points import Cell, Point
from benchmark.harness.suite import Suite
from benchmark.harness.workload import longest_prompt
from sglang_hc.tools.cli.main import UsageError

Show: TypeAlias = "Callable[[dict[str, Any], Sequence[Path], Path], str]"
"""(result, plots, output folder) to what is printed at the end."""


def execute(
    experiment: str,
    setup: Setup,
    points: Sequence[Point],
    names: Groups,
    *,
    extra: dict[str, Any] | None = None,
    show: Show | None = None,
) -> int:
    """Run, compare, write results, plots and the report, and print what `show` makes of them.

    extra: further settings for the result. show: every table by default.
    Returns the exit status: 1 when a request failed or a disagreement is not explained.
    """
    _terminate_like_interrupt()
    longest = max(longest_prompt(point.workload(0)) for point in points)
    kept = setup.kept(experiment, names)
    suite = Suite(setup.arms, points, setup.suite_settings(longest, kept))
    cells = suite.run()
    if not cells:
        print(f"nothing left to run: {setup.args.cells} holds every run")
        return 0
    _check_answers(cells)
    reference = setup.arms[0]
    compared = not setup.args.no_compare
    agreements = compare(cells, reference.name, _finder(points)) if compared else []
    notes = _explain(suite, reference, agreements, setup.args.request_timeout)
    settings = {**setup.described(), **(extra or {})}
    result = results.build(
        experiment,
        arms=setup.arms,
        skipped=[*setup.skipped, *notes],
        points=points,
        cells=cells,
        agreements=agreements,
        start_s=suite.start_s,
        settings=settings,
        names=names,
    )
    output = setup.args.output
    results.write(result, cells, output)
    drawn = plots.draw(result, cells, output)
    page.write(result, drawn, output / "report.html")
    print((show or _everything)(result, drawn, output))
    return _status(cells, agreements)


def _everything(result: dict[str, Any], plots: Sequence[Path], output: Path) -> str:
    names = ", ".join(path.name for path in plots)
    return f"{report.console(result)}\n\nresults in {output}: result.json, report.html, {names}"


def _finder(points: Sequence[Point]) -> Any:
    by_name = {point.name: point for point in points}
    return lambda name, repeat: by_name[name].workload(repeat)


def _check_answers(cells: Sequence[Cell]) -> None:
    for cell in cells:
        if not cell.run.measured:
            reason = "no reply ended in time, give a longer --window"
            if not cell.run.records or cell.run.failed:
                reason = cell.run.failed[0].error if cell.run.failed else "nothing was sent"
            raise UsageError(f"arm {cell.arm}, {cell.point}: no request succeeded ({reason})")


def _explain(
    suite: Suite, reference: Arm, agreements: Sequence[Agreement], timeout_s: float
) -> list[str]:
    """Ask the reference server how close every disagreement was; notes about what failed."""
    items = [item for agreement in agreements for item in agreement.disagreements]
    if not items:
        return []
    print(f"asking {reference.name} about {len(items)} differing tokens", flush=True)
    with suite.served(reference) as url:
        try:
            asyncio.run(_ask_margins(url, items, timeout_s))
        except (RequestFailed, KeyError) as error:
            return [f"logprob margins could not be asked: {error}"]
    return []


async def _ask_margins(url: str, items: Sequence[Disagreement], timeout_s: float) -> None:
    async with Client(url, timeout_s) as client:
        info = await client.get_json("/server_info")
        await explain(client, items, str(info.get("dtype", "auto")))


def _status(cells: Sequence[Cell], agreements: Sequence[Agreement]) -> int:
    failed = sum(len(cell.run.failed) for cell in cells)
    for cell in cells:
        for record in cell.run.failed[:3]:
            place = f"session {record.session} turn {record.turn}"
            print(f"failed: {cell.arm}, {cell.point}, {place}: {record.error}")
    unexplained = sum(not item.explained for a in agreements for item in a.disagreements)
    return 1 if failed or unexplained else 0


def _terminate_like_interrupt() -> None:
    """Make SIGTERM unwind the stack as Ctrl-C does, so that no server is left behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
