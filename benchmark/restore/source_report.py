"""Lines, tables and the plot of what from_source.py has measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ARMS = ("recompute", "serial", "overlapped")
OTHERS = ("recompute", "serial")


def line_of(row: dict[str, Any]) -> str:
    return (
        f"{row['source']:13} {row['source_gbps']:8.4f} GB/s {row['history']:5} {row['form']:9} "
        f"{row['arm']:10} {row['ttft_ms']:8.0f} ms, {row['ttft_ms'] / row['bound_ms']:5.2f} of the "
        f"bound, {row['ttft_ms'] / row['predicted_ms']:5.2f} of the prediction"
    )


def tables_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For the pages: `ratios` by source and form over all histories, and `restart`."""
    cell: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cell.setdefault((row["source"], row["form"], row["history"]), {})[row["arm"]] = row
    groups: dict[tuple[str, str], list[dict[str, dict[str, Any]]]] = {}
    turns = []
    for (source, form, history), arms in cell.items():
        if source != "restart":
            groups.setdefault((source, form), []).append(arms)
            continue
        ours, plain = arms["overlapped"]["ttft_ms"], arms["recompute"]["ttft_ms"]
        turns.append([str(history), form, f"{ours:.0f}", f"{plain:.0f}", f"{plain / ours:.1f}"])
    ratios = []
    for (source, form), some in groups.items():
        mine = [arms["overlapped"]["ttft_ms"] for arms in some]
        others = [
            min(row["ttft_ms"] for arm, row in arms.items() if arm in OTHERS) for arms in some
        ]
        bounds = [arms["overlapped"]["bound_ms"] for arms in some]
        told = [row["ttft_ms"] / row["predicted_ms"] for arms in some for row in arms.values()]
        ratios.append([
            source, form, _range(m / o for m, o in zip(mine, others, strict=True)),
            _range(m / b for m, b in zip(mine, bounds, strict=True)), _range(told),
        ])  # fmt: skip
    return {
        "ratios": {
            "columns": ["source", "form", "of the best other", "of the bound", "of the prediction"],
            "rows": ratios,
        },
        "restart": {
            "columns": ["history", "form", "restored, ms", "recomputed, ms", "times faster"],
            "rows": turns,
        },
    }


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """TTFT against the rate of the source, points as measured, lines as predicted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row["source"] == "disk" or row["source"].startswith("bucket")]
    histories = sorted({row["history"] for row in rows})
    forms = sorted({row["form"] for row in rows})
    figure, panels = plt.subplots(
        len(forms), len(histories), figsize=(3.6 * len(histories), 3.2 * len(forms)), squeeze=False
    )
    colours = dict(zip(ARMS, ("#444444", "#d95f02", "#1b9e77"), strict=True))
    for place, axes in zip(
        [(form, history) for form in forms for history in histories], panels.flat, strict=True
    ):
        for arm in ARMS:
            mine = sorted(
                (row["source_gbps"], row["ttft_ms"], row["predicted_ms"])
                for row in rows
                if (row["form"], row["history"], row["arm"]) == (*place, arm)
            )
            if mine:
                gbps, measured, predicted = zip(*mine, strict=True)
                axes.plot(gbps, measured, "o", color=colours[arm], label=arm)
                axes.plot(gbps, predicted, "-", color=colours[arm], linewidth=1)
        axes.set(
            xscale="log", yscale="log", title=f"{place[1]} tokens, {place[0]}",
            xlabel="source, GB/s", ylabel="time to first token, ms",
        )  # fmt: skip
        axes.grid(alpha=0.3)
    panels[0][0].legend(title="points measured, lines predicted", fontsize=7, title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
