"""PNG plots of a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from benchmark.harness import report
from benchmark.harness.points import Cell

matplotlib.use("Agg")

from matplotlib import pyplot as plt

_COLOURS = ("#444444", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e")


def draw(result: dict[str, Any], cells: Sequence[Cell], output: Path) -> list[Path]:
    """Write every plot that the result has data for; returns their paths."""
    drawn = []
    numbers = {point["value"] for point in result["points"]} - {None}
    if len(numbers) > 1:
        drawn.append(_save(output / "ttft_by_value.png", lambda ax: _by_value(result, ax)))
    if result["experiment"] == "cliff":
        drawn.append(_save(output / "cliff.png", lambda ax: _cliff(result, ax)))
    if len({name for run in result["runs"] for name in run["groups"]}) > 1:
        drawn.append(_save(output / "ttft_by_group.png", lambda ax: _by_group(result, ax)))
    gains = report.gains(result) if result["experiment"] == "long-context" else []
    if gains:
        drawn.append(_save(output / "gain_by_hit_rate.png", lambda ax: _gain(result, gains, ax)))
    drawn.append(_save(output / "ttft_cdf.png", lambda ax: _cdf(result, cells, ax)))
    drawn.append(_save(output / "hits_by_tier.png", lambda ax: _hits(result, ax)))
    return drawn


def _save(path: Path, paint: Callable[[Any], None]) -> Path:
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=110)
    paint(axes)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path


def _arms(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(arm["name"], _COLOURS[i % len(_COLOURS)]) for i, arm in enumerate(result["arms"])]


def _by_value(result: dict[str, Any], axes: Any, of: str = "median_ttft") -> None:
    for arm, colour in _arms(result):
        points: dict[float, list[float]] = {}
        for run in result["runs"]:
            if run["arm"] == arm and run["value"] is not None:
                points.setdefault(run["value"], []).append(run["summary"][of])
        values = sorted(points)
        middle = [float(np.median(points[value])) for value in values]
        axes.plot(values, middle, marker="o", color=colour, label=arm)
    axes.set_xlabel(result["settings"].get("sweep", "value"))
    axes.set_ylabel("median TTFT (s)")
    axes.set_ylim(bottom=0)
    axes.legend()


def _cliff(result: dict[str, Any], axes: Any) -> None:
    """Throughput by conversations, with a line where the KV pool is full."""
    _by_value(result, axes, "output_token_throughput")
    settings = result["settings"]
    holds = settings["pool_tokens"] / settings["conversation_tokens"]
    axes.axvline(holds, color="#999999", linestyle="--")
    axes.set_xscale("log", base=2)
    values = [point["value"] for point in result["points"]]
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_ylabel("output tokens/s")


def _by_group(result: dict[str, Any], axes: Any) -> None:
    """Medians with a bar to p90, over all points of the sweep."""
    names = list(
        dict.fromkeys(
            name for run in result["runs"] for name in run["groups"] if not name.endswith("+")
        )
    )
    places = np.arange(len(names))
    width = 0.8 / len(result["arms"])
    for index, (arm, colour) in enumerate(_arms(result)):
        runs = [run for run in result["runs"] if run["arm"] == arm]
        middle = [_of_group(runs, name, "median_ttft") for name in names]
        high = [_of_group(runs, name, "p90_ttft") for name in names]
        above = np.maximum(np.subtract(high, middle), 0)
        axes.bar(
            places + index * width,
            middle,
            width,
            yerr=[np.zeros(len(names)), above],
            color=colour,
            label=arm,
            capsize=2,
        )
    axes.set_xticks(places + 0.4 - width / 2, names, rotation=20 if len(names) > 6 else 0)
    axes.set_ylabel("TTFT (s): median, line to p90")
    axes.legend()


def _gain(result: dict[str, Any], gains: list[dict[str, Any]], axes: Any) -> None:
    for arm, colour in _arms(result):
        chosen = sorted(
            (row["device_hit_rate"], row["better"]) for row in gains if row["arm"] == arm
        )
        if chosen:
            axes.plot(*zip(*chosen, strict=True), marker="o", color=colour, label=arm)
    axes.axhline(1.0, color="#999999", linestyle="--")
    axes.set_xlabel(f"share of prompt tokens on the device ({result['reference']})")
    axes.set_ylabel("average TTFT: times better")
    axes.legend()


def _of_group(runs: list[dict[str, Any]], name: str, key: str) -> float:
    values = [run["groups"][name][key] for run in runs if name in run["groups"]]
    return float(np.median(values)) if values else 0.0


def _cdf(result: dict[str, Any], cells: Sequence[Cell], axes: Any) -> None:
    for arm, colour in _arms(result):
        values = sorted(
            record.reply.ttft_s for cell in cells if cell.arm == arm for record in cell.run.measured
        )
        if values:
            axes.step(values, np.arange(1, len(values) + 1) / len(values), color=colour, label=arm)
    axes.set_xlabel("TTFT (s)")
    axes.set_xscale("log")
    axes.set_ylabel("share of requests")
    axes.legend()


def _hits(result: dict[str, Any], axes: Any) -> None:
    """Share of prompt tokens by where they came from; the rest was computed."""
    names = [arm["name"] for arm in result["arms"]]
    tiers = sorted(
        {tier for run in result["runs"] for tier, hits in run["summary"]["hits"].items() if hits}
    )
    base = np.zeros(len(names))
    for index, tier in enumerate(tiers):
        share = np.array([_tier_share(result, name, tier) for name in names])
        axes.bar(names, share, bottom=base, label=tier, color=_COLOURS[(index + 1) % len(_COLOURS)])
        base += share
    axes.bar(names, 1 - base, bottom=base, label="computed", color="#dddddd")
    axes.set_ylabel("share of prompt tokens")
    axes.set_ylim(0, 1.15)
    axes.legend(loc="upper center", ncol=len(tiers) + 1)


def _tier_share(result: dict[str, Any], arm: str, tier: str) -> float:
    chosen = [run for run in result["runs"] if run["arm"] == arm]
    prompt = sum(
        run["summary"]["average_prompt_len"] * run["summary"]["total_requests"] for run in chosen
    )
    return sum(run["summary"]["hits"].get(tier, 0) for run in chosen) / prompt if prompt else 0.0
