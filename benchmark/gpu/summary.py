"""One page from the cells alone: what ran, the goals, tables, plots where matplotlib is there."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.ends import returning
from benchmark.gpu.settings import SHAPES, goal_lines
from benchmark.gpu.tables import all_tables, capture_rows, of_step, served_results
from benchmark.harness import metrics, page
from benchmark.harness.cells import OK, Cell, latest, on_gpu, read
from benchmark.restore.goals import capture_lines, restore_lines

ARMS = ("recompute", "kv", "hidden", "mix")


def write_page(cells: Path, target: Path) -> None:
    """Make the page of a file of cells. Raises OSError."""
    found = latest(read(cells))
    title = "sglang-hc: GPU campaign"
    body = [f"<h1>{title}</h1>", *(f"<p>{html.escape(line)}</p>" for line in about(found))]
    body += ["<h2>Goals</h2>", page.bullets(goals(found) or ["nothing to judge yet"])]
    body += plots(found)
    for table in all_tables(found).values():
        body += [f"<h2>{html.escape(table.title)}</h2>", page.html_table(table)]
    body += [_failure(cell) for cell in found.values() if cell["values"].get("log")]
    target.write_text(page.document(title, body), encoding="utf-8")


def about(found: dict[str, Cell]) -> list[str]:
    """Devices, versions, commits and times of the measurements."""
    good = [cell for cell in found.values() if cell["status"] == OK]
    if not good:
        return ["Nothing was measured yet."]
    times = sorted(cell["at"] for cell in good)
    versions = {
        ", ".join(f"{name} {value}" for name, value in cell["versions"].items() if value)
        for cell in good
    }
    lines = [f"{len(good)} cells, {times[0]} to {times[-1]}."]
    if not any(map(on_gpu, good)):
        lines.append("Measured without a GPU: this shows that everything runs, and no speed.")
    lines += [f"Device: {device}" for device in sorted({cell["device"] for cell in good})]
    lines += [f"Versions: {line}" for line in sorted(versions)]
    lines.append(f"Commit: {', '.join(sorted({cell['commit'] for cell in good}))}")
    return lines


def goals(found: dict[str, Cell]) -> list[str]:
    """What was met and what was missed, of everything that there is."""
    lines = []
    for row in of_step(found, "drift"):
        verdict = "met" if row["good"] else "MISSED"
        worst = max(row["worst_prompt_row"], row["worst_decoded_row"])
        how = ", deterministic" if row["deterministic"] else ""
        place = f"{row['model']} {row['dtype']} {row['layer_plan']}{how}"
        lines.append(f"{verdict}: drift of {place} is {worst:.1e}, at most {row['limit']:.1e}")
    for row in of_step(found, "returning"):
        verdict = "met" if returning.good(row) else "MISSED"
        lines.append(f"{verdict}: with {row['kind']}, what left says what stayed says")
    rows = [row for row in of_step(found, "restore") if "arm" in row]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of_shape = [row for row in rows if row["shape"] == shape]
        lines += [f"{line} ({shape})" for line in restore_lines(of_shape, shape)]
    lines += capture_lines(capture_rows(found))
    for result in served_results(found).values():
        shape = result["settings"]["shape"]
        if shape in SHAPES:
            lines += [f"{line} ({shape})" for line in goal_lines(result, shape)]
    return lines


def plots(found: dict[str, Cell]) -> list[str]:
    """Pictures as HTML; one sentence where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return ["<p>No plots: matplotlib is not installed here.</p>"]
    matplotlib.use("Agg")
    drawn = []
    rows = [r for r in of_step(found, "restore") if r.get("source") in ("-", "host")]
    for shape, slots in dict.fromkeys((r["shape"], r["slots"]) for r in rows):
        here = [r for r in rows if (r["shape"], r["slots"]) == (shape, slots)]
        drawn.append(_plot(partial(_restores, here), f"{shape}, {slots} slots"))
    rates = [r for r in of_step(found, "device") if "gb_per_s" in r]
    if rates:
        drawn.append(_plot(lambda ax: _bars(ax, rates), "copies"))
    for name, result in served_results(found).items():
        if result["experiment"] == "multi-turn":
            drawn.append(_plot(partial(_turns, result), name))
    return drawn


def _restores(rows: Sequence[dict[str, Any]], axes: Any) -> None:
    for arm in ARMS:
        points = sorted((r["history"], 1e3 * r["seconds"]) for r in rows if r["arm"] == arm)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=arm)
    axes.set(xlabel="tokens", ylabel="ms until the last layer's K/V", xscale="log", yscale="log")
    axes.legend()


def _bars(axes: Any, rates: Sequence[dict[str, Any]]) -> None:
    axes.barh([r["name"] for r in rates], [r["gb_per_s"] for r in rates])
    axes.set_xlabel("GB/s")


def _turns(result: dict[str, Any], axes: Any) -> None:
    times = {
        run["arm"]: 1e3 * run["groups"][metrics.LATER_TURNS]["median_ttft"]
        for run in result["runs"]
        if metrics.LATER_TURNS in run["groups"]
    }
    axes.bar(list(times), list(times.values()))
    axes.set_ylabel("ms to the first token, later turns")


def _plot(paint: Callable[[Any], None], title: str) -> str:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=90)
    paint(axes)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer)
    plt.close(figure)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<p><img alt="{html.escape(title)}" src="data:image/png;base64,{data}"></p>'


def _failure(cell: Cell) -> str:
    values = cell["values"]
    head = html.escape(f"{cell['key']}: {values.get('reason', '')}")
    return f"<h3>{head}</h3><pre>{html.escape(values['log'])}</pre>"
