"""Tables of the capacity cliff: pure functions of the result JSON, as in `report.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmark.harness.report import Table, seconds

_SOURCES = ("device", "host", "storage")
"""Where cached tokens of a prompt came from, as SGLang calls it; a disk or a remote store is one
source there."""

Runs = Sequence[dict[str, Any]]


def table(result: dict[str, Any]) -> Table:
    """One row for every arm with so many conversations, medians of the repeats."""
    holds = result["settings"]["pool_tokens"] / result["settings"]["conversation_tokens"]
    rows = []
    for point in result["points"]:
        for arm in result["arms"]:
            runs = _runs(result, arm["name"], point["value"])
            if not runs:
                continue
            peaks = _peaks(result, arm["name"])
            shares = [
                *(_share(runs, name) for name in _SOURCES),
                _median(1 - run["summary"]["cache_hit_rate"] for run in runs),
            ]
            rows.append(
                (
                    f"{point['value']:g} ({point['value'] / holds:.1f})",
                    arm["name"],
                    f"{_median(map(_rate, runs)):.1f}",
                    f"{_median(_rate(run) / peaks[run['repeat']] for run in runs):.2f}",
                    seconds(_median(run["summary"]["median_ttft"] for run in runs)),
                    seconds(_median(run["summary"]["p90_ttft"] for run in runs)),
                    *(f"{share:.0%}" for share in shares),
                )
            )
    head = (
        *("conversations (of the pool)", "arm", "tokens/s", "of its peak", "TTFT median"),
        *("TTFT p90", *_SOURCES, "computed"),
    )
    return Table("Conversations at once", head, tuple(rows))


def sentence(result: dict[str, Any]) -> str:
    """What of its own peak each arm has left with the most conversations."""
    most = max(point["value"] for point in result["points"])
    said = []
    for arm in result["arms"]:
        peaks = _peaks(result, arm["name"])
        left = [_rate(run) / peaks[run["repeat"]] for run in _runs(result, arm["name"], most)]
        if left:
            said.append(f"{arm['name']} {_median(left):.2f} ({min(left):.2f} to {max(left):.2f})")
    return f"With {most:g} conversations, tokens/s of the arm's own peak: {', '.join(said)}."


def _runs(result: dict[str, Any], arm: str, value: float) -> Runs:
    return [run for run in result["runs"] if (run["arm"], run["value"]) == (arm, value)]


def _rate(run: dict[str, Any]) -> float:
    return float(run["summary"]["output_token_throughput"])


def _peaks(result: dict[str, Any], arm: str) -> dict[int, float]:
    """The highest throughput of each repeat, whatever the conversations."""
    runs = [run for run in result["runs"] if run["arm"] == arm]
    repeats = {run["repeat"] for run in runs}
    return {n: max(_rate(run) for run in runs if run["repeat"] == n) for n in repeats}


def _share(runs: Runs, source: str) -> float:
    """Of all prompt tokens."""
    return _median(
        run["summary"]["hits"].get(source, 0)
        / (run["summary"]["average_prompt_len"] * run["summary"]["total_requests"])
        for run in runs
    )


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))
