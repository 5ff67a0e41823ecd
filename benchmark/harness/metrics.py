"""Numbers from records: summaries, groups, ratios, the region where an arm loses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from benchmark.harness.arms import HICACHE

if TYPE_CHECKING:  # tables are made from JSON alone, without the HTTP client
    from benchmark.harness.driver import Record, Run

Groups: TypeAlias = "Callable[[Record], tuple[str, ...]]"
"""Names under which a record is counted, e.g. ("turn 3", "turns 1+")."""

LATER_TURNS = "turns 1+"
RATIOS = {
    # metric of a group or summary: whether larger is better
    "median_ttft": False,
    "median_tbt": False,
    "output_token_throughput": True,
}


def by_turn(record: Record) -> tuple[str, ...]:
    """Groups of a chat: the turn, and all turns after the first together."""
    name = f"turn {record.turn}"
    return (name, LATER_TURNS) if record.turn else (name,)


def by_label(record: Record) -> tuple[str, ...]:
    """Groups of a benchmark that labels its requests."""
    return (record.label,)


def _stats(name: str, values: Sequence[float]) -> dict[str, float]:
    data = np.asarray(values or [0.0], dtype=np.float64)
    return {
        f"average_{name}": float(data.mean()),
        f"median_{name}": float(np.median(data)),
        f"p90_{name}": float(np.percentile(data, 90)),
        f"p95_{name}": float(np.percentile(data, 95)),
        f"p99_{name}": float(np.percentile(data, 99)),
        f"max_{name}": float(data.max()),
    }


def tbt(record: Record) -> float | None:
    """Time between tokens of one reply in seconds; None when it has one token."""
    reply = record.reply
    if reply.tokens < 2:
        return None
    return (reply.latency_s - reply.ttft_s) / (reply.tokens - 1)


def _tbts(records: Iterable[Record]) -> list[float]:
    return [value for record in records if (value := tbt(record)) is not None]


def hits_by_tier(records: Iterable[Record]) -> dict[str, int]:
    """Cached prompt tokens by tier, summed."""
    total: dict[str, int] = {}
    for record in records:
        for tier, count in record.reply.hits.items():
            total[tier] = total.get(tier, 0) + count
    return total


def _hit_rate(records: Sequence[Record]) -> float:
    prompt = sum(record.reply.prompt_tokens for record in records)
    return sum(hits_by_tier(records).values()) / prompt if prompt else 0.0


def summary(run: Run, rate: float) -> dict[str, Any]:
    """Totals under the names of SGLang's bench_multiturn; ours are added (tbt, p95, hits, failed).

    Times in seconds, throughput in tokens or requests per second over the measured duration. In a
    window all tokens of replies count that came in it.
    """
    records = run.measured
    seconds = run.duration_s or float("inf")
    prompt = [record.reply.prompt_tokens for record in records]
    output = [record.reply.tokens for record in records]
    return {
        "total_requests": len(records),
        "request_rate": rate,
        **_stats("prompt_len", prompt),
        **_stats("output_len", output),
        **_stats("ttft", [record.reply.ttft_s for record in records]),
        **_stats("itl", [gap for record in records for gap in record.reply.itl_s]),
        **_stats("latency", [record.reply.latency_s for record in records]),
        **_stats("tbt", _tbts(records)),
        "input_token_throughput": sum(prompt) / seconds,
        "output_token_throughput": (run.window.tokens if run.window else sum(output)) / seconds,
        "throughput": len(records) / seconds,
        "cache_hit_rate": _hit_rate(records),
        "hits": hits_by_tier(records),
        "failed": len(run.failed),
        "duration": run.duration_s,
    }


def groups(run: Run, names: Groups) -> dict[str, dict[str, Any]]:
    """Statistics of every group of measured records, by the turn that begins it; totals last."""
    chosen: dict[str, list[Record]] = {}
    for record in sorted(run.measured, key=lambda record: record.turn):
        for name in names(record):
            chosen.setdefault(name, []).append(record)
    ordered = sorted(chosen, key=lambda name: name.endswith("+"))
    return {name: _group(chosen[name]) for name in ordered}


def _group(records: list[Record]) -> dict[str, Any]:
    prompt = sum(record.reply.prompt_tokens for record in records)
    hits = hits_by_tier(records)
    return {
        "requests": len(records),
        **_stats("ttft", [record.reply.ttft_s for record in records]),
        **_stats("tbt", _tbts(records)),
        "prompt_tokens": prompt,
        "hits": hits,
        "cache_hit_rate": sum(hits.values()) / prompt if prompt else 0.0,
        "device_hit_rate": hits.get("device", 0) / prompt if prompt else 0.0,
    }


def ratio_rows(runs: Sequence[Mapping[str, Any]], reference: str) -> list[dict[str, Any]]:
    """How many times better each arm is than the reference (`against`), above 1 is better.

    `runs` are the result's run objects. Every repeat gives one ratio of the two arms in that
    repeat; a row has their median, smallest and largest.
    """
    place = {(run["arm"], run["point"], run["repeat"]): run for run in runs}
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for (arm, point, repeat), run in place.items():
        base = place.get((reference, point, repeat))
        if arm == reference or base is None:
            continue
        for group, metric, ours, theirs in _pairs(run, base):
            if ours > 0 and theirs > 0:
                better = ours / theirs if RATIOS[metric] else theirs / ours
                found.setdefault((arm, point, group, metric), []).append(better)
    return [
        {
            **dict(zip(("arm", "point", "group", "metric"), key, strict=True)),
            "median": float(np.median(values)),
            "low": min(values),
            "high": max(values),
            "repeats": len(values),
            "against": reference,
        }
        for key, values in found.items()
    ]


def _pairs(
    run: Mapping[str, Any], base: Mapping[str, Any]
) -> Iterable[tuple[str, str, float, float]]:
    for group, stats in run["groups"].items():
        other = base["groups"].get(group)
        if other is not None:
            yield group, "median_ttft", stats["median_ttft"], other["median_ttft"]
    for metric in ("median_tbt", "output_token_throughput"):
        yield "all", metric, run["summary"][metric], base["summary"][metric]


def losses(ratios: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences about every place where an arm of ours is slower than what it is compared with."""
    words = {
        "median_ttft": "median TTFT",
        "median_tbt": "median time between tokens",
        "output_token_throughput": "output throughput",
    }
    said = []
    for row in sorted(ratios, key=lambda row: float(row["median"])):
        if row["median"] >= 1 or row["arm"] in HICACHE:
            continue
        said.append(
            f"{row['arm']}, {row['point']}, {row['group']}: {words[row['metric']]} is "
            f"{row['median']:.2f} times as good as {row['against']}'s ({_spread(row)})"
        )
    return said


def _spread(row: Mapping[str, Any]) -> str:
    if row["repeats"] == 1:
        return "one repeat"
    noise = ", within the spread of the repeats" if row["high"] >= 1 else ""
    return f"{row['low']:.2f} to {row['high']:.2f} in {row['repeats']} repeats{noise}"
