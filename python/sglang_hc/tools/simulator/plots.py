"""Plots of simulations. Needs matplotlib, imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_hc.tools.simulator.capacity import CapacityPoint
from sglang_hc.tools.simulator.run import Result


def plot_result(result: Result, path: Path) -> None:
    """Hit tokens by tier, and the distribution of the time to first token. Raises OSError."""
    figure, (left, right) = subplots(2)
    measures = result.measures
    names = ("device", "host", "disk", "computed")
    parts = [measures.device, measures.host, measures.disk]
    parts.append(measures.prompt_tokens - sum(parts))
    left.bar(names, [100 * part / max(1, measures.prompt_tokens) for part in parts])
    left.set_ylabel("% of prompt tokens")
    left.set_title(f"{result.setup.workload.name}, {result.setup.policy}")
    ordered = sorted(measures.ttft)
    shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
    right.plot(ordered, shares)
    right.set_xlabel("seconds to first token, waiting included")
    right.set_ylabel("% of turns")
    _save(figure, path)


def plot_capacity(
    curve: Sequence[CapacityPoint], target: float, needed: CapacityPoint | None, path: Path
) -> None:
    """Hit rate over stored bytes, with the target and where it is reached. Raises OSError."""
    figure, (axis,) = subplots(1)
    sizes = [point.num_bytes / 1e9 for point in curve]
    axis.plot(sizes, [100 * point.hit_rate for point in curve], marker="o")
    axis.axhline(100 * target, linestyle="--", color="gray")
    if needed is not None:
        axis.axvline(needed.num_bytes / 1e9, linestyle=":", color="gray")
    axis.set_xscale("log")
    axis.set_xlabel("DRAM + SSD, GB")
    axis.set_ylabel("% of reusable tokens hit")
    _save(figure, path)


def subplots(count: int) -> tuple[Any, Any]:
    """A figure with so many plots side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(5 * count, 3.6), squeeze=False)
    return figure, tuple(axes[0])


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
