"""Tables from the cells of a campaign, for its page and for the committed results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from benchmark.ends import returning
from benchmark.harness import report, results
from benchmark.harness.cells import OK, Cell
from benchmark.harness.report import Table

ORDER = {"stock": 0, "auto": 9}
"""Arms of one result: the reference first, ours last, HiCache's between them."""

SERVED = ("multi-turn", "overhead")


def of_step(found: Mapping[str, Cell], step: str) -> list[dict[str, Any]]:
    """Values of the measurements of one kind."""
    return [cell["values"] for cell in found.values() if cell["step"] == step and _good(cell)]


def _good(cell: Cell) -> bool:
    return bool(cell["status"] == OK)


def all_tables(found: Mapping[str, Cell]) -> dict[str, Table]:
    """Tables by name, those without rows left out."""
    tables = {
        "steps": steps_table(found),
        "drift": drift_table(found),
        "device": device_table(found),
        "restore": restore_table(found),
        "capture": capture_table(found),
        "kernels": kernel_table(found),
        "checks": checks_table(found),
        "throughput": throughput_table(found),
        "returning": returning_table(found),
    }
    for name, result in served_results(found).items():
        tables[name] = report.summary_table(result)
        if result["experiment"] == "multi-turn":
            tables[name] = report.overview_table(result)
        tables[name] = Table(name, tables[name].head, tables[name].rows)
    return {name: table for name, table in tables.items() if table.rows}


def steps_table(found: Mapping[str, Cell]) -> Table:
    rows = [
        (cell["key"].removeprefix("step "), cell["status"], f"{cell['seconds']:.0f}", _reason(cell))
        for cell in found.values()
        if cell["step"] == "campaign" or not _good(cell)
    ]
    return Table("Steps", ("step or cell", "ended", "s", "reason"), tuple(rows))


def _reason(cell: Cell) -> str:
    return str(cell["values"].get("reason", "")).partition("\n")[0]


def drift_table(found: Mapping[str, Cell]) -> Table:
    rows = [
        (
            *(row["model"], row["dtype"], row["layer_plan"]),
            "deterministic" if row["deterministic"] else "default",
            f"{row['worst_prompt_row']:.1e}",
            f"{row['worst_decoded_row']:.1e}",
            "yes" if row["bit_equal"] else "no",
            str(row["restored_tokens"]),
        )
        for row in of_step(found, "drift")
    ]
    head = ("model", "dtype", "plan", "mode", "prompt rows", "decoded rows", "bit equal", "tokens")
    return Table("Restored K/V against the originals, relative to the largest", head, tuple(rows))


def device_table(found: Mapping[str, Cell]) -> Table:
    rows = []
    for row in of_step(found, "device"):
        if "gb_per_s" in row:
            rate, cost = f"{row['gb_per_s']:.1f} GB/s", f"{row['us_per_call']:.1f}"
        elif "tflop_per_s" in row:
            rate, cost = f"{row['tflop_per_s']:.1f} TFLOP/s", "-"
        elif "gib_per_s" in row:
            rate, cost = f"{row['gib_per_s']:.1f} GiB/s, {row['seconds']:.1f} s", "-"
        else:
            continue
        rows.append((row["name"], rate, cost))
    return Table("The device and its link", ("what", "rate", "us a call"), tuple(rows))


def restore_table(found: Mapping[str, Cell]) -> Table:
    rows = [
        (
            *(row["shape"], row["slots"], str(row["history"]), row["source"], row["arm"]),
            f"{1e3 * row['seconds']:.2f}",
            f"{row['of_bound']:.2f}",
            row["runs_as"],
        )
        for row in of_step(found, "restore")
        if "arm" in row
    ]
    head = ("model", "slots", "tokens", "from", "arm", "ms", "of bound", "runs as")
    return Table("Restorations", head, tuple(rows))


def capture_rows(found: Mapping[str, Cell]) -> list[dict[str, Any]]:
    """One row per batch over all repeats that have both arms."""
    pairs: dict[tuple[str, int], dict[str, dict[str, float]]] = {}
    for row in of_step(found, "capture"):
        pairs.setdefault((row["shape"], row["repeat"]), {})[row["arm"]] = row["step_s"]
    return pair_rows(pair for pair in pairs.values() if len(pair) == 2)


def pair_rows(found: Iterable[Mapping[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """One row per batch from pairs of engines, `on` and `off`: medians, and each pair's ratio."""

    pairs = list(found)
    rows = []
    for batch in pairs[0]["on"] if pairs else ():
        on, off = (median(pair[arm][batch] for pair in pairs) for arm in ("on", "off"))
        ratios = [pair["on"][batch] / pair["off"][batch] for pair in pairs]
        rows.append(
            {
                **{"batch": int(batch), "on_s": on, "off_s": off},
                **{"ratio": median(ratios), "ratios": ratios},
            }
        )
    return rows


def capture_table(found: Mapping[str, Cell]) -> Table:
    rows = [
        (
            str(row["batch"]),
            f"{1e3 * row['off_s']:.3f}",
            f"{1e3 * row['on_s']:.3f}",
            f"{row['ratio']:.4f}",
            str(len(row["ratios"])),
        )
        for row in capture_rows(found)
    ]
    head = ("batch", "ms without capture", "ms with", "times", "pairs")
    return Table("Time between tokens", head, tuple(rows))


def kernel_table(found: Mapping[str, Cell]) -> Table:
    rows = [
        (
            *(row["shape"], str(row["tokens"]), row["group"], arm),
            *(f"{times['median_ms']:.4f}", f"{times['of_bound']:.2f}"),
            f"{times['max_difference_from_first_arm']:.1e}",
        )
        for row in of_step(found, "kernels")
        for arm, times in row["arms"].items()
    ]
    head = ("shape", "tokens", "work", "arm", "ms", "of bound", "difference")
    return Table("Kernels", head, tuple(rows))


def throughput_table(found: Mapping[str, Cell]) -> Table:
    rows = [
        (
            row["arm"],
            f"{1e3 * row['pass_s']:.1f}",
            *(f"{1e3 * row[name]:.1f}" if name in row else "" for name in RETURNS),
        )
        for row in of_step(found, "throughput")
    ]
    head = (
        *("hidden states", "ms of a pass", "link of a pass"),
        *("restored, ms", "recomputed, ms"),
    )
    return Table("Weights and state in host memory", head, tuple(rows))


RETURNS = ("link_s", "restored_s", "recomputed_s")
"""Of weights alone in host memory: a conversation that returns."""


def returning_table(found: Mapping[str, Cell]) -> Table:
    rows = [tuple(returning.cells_of(row)) for row in of_step(found, "returning")]
    return Table("Conversations that left the device", returning.COLUMNS, tuple(rows))


def checks_table(found: Mapping[str, Cell]) -> Table:
    rows = [
        (row["tests"], f"{row.get('passed', 0)} passed, {row.get('skipped', 0)} skipped")
        for row in of_step(found, "checked")
    ]
    for row in of_step(found, "smoke"):
        said = ", ".join(f"{arm} {verdict}" for arm, verdict in row["outputs"].items())
        rows.append((f"smoke {row['model']}", "; ".join([said, *row["problems"]])))
    return Table("Checks", ("what", "said"), tuple(rows))


def served_results(found: Mapping[str, Cell]) -> dict[str, dict[str, Any]]:
    """Results as `python -m benchmark` writes them, by experiment and model, from single runs."""
    made = {}
    for step in SERVED:
        rows = of_step(found, step)
        for model in dict.fromkeys(row["model"] for row in rows):
            name = f"{step}-{model.removesuffix('-shape')}"
            made[name] = _served(step, [row for row in rows if row["model"] == model])
    return made


def _served(step: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    arms: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: ORDER.get(row["arm"]["name"], 5)):
        arm = arms.setdefault(row["arm"]["name"], {**row["arm"], "start_s": []})
        arm["start_s"] += row["arm"]["start_s"]
    points = {row["point"]["name"]: row["point"] for row in rows}
    shape = rows[0]["model"].removesuffix("-shape")
    return results.from_runs(
        step,
        [row["run"] for row in rows],
        arms=list(arms.values()),
        points=list(points.values()),
        settings={**rows[0]["settings"], "shape": shape},
        command="python -m benchmark.gpu.campaign",
        measured_on=rows[0]["machine"],
    )
