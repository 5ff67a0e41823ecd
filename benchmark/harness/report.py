"""Tables from a result: for the console, for Markdown and for the HTML report.

Everything here is a pure function of the result JSON, so that committed results reproduce
published tables (benchmark/make_tables.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.harness import machine, metrics


@dataclass(frozen=True)
class Table:
    """Title, head and rows of text."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in Markdown, without the title."""
        widths = [
            max(3, len(self.head[i]), *(len(row[i]) for row in self.rows))
            for i in range(len(self.head))
        ]
        lines = [
            _line(self.head, widths),
            "|" + "|".join("-" * (width + 2) for width in widths) + "|",
            *(_line(row, widths) for row in self.rows),
        ]
        return "\n".join(lines)


def _line(words: Sequence[str], widths: Sequence[int]) -> str:
    cells = (word.ljust(width) for word, width in zip(words, widths, strict=True))
    return "| " + " | ".join(cells) + " |"


def seconds(value: float) -> str:
    """A time in the unit that reads best."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def tables(result: dict[str, Any]) -> list[Table]:
    """All tables of a result, the most important first."""
    chosen = [group_table(result), summary_table(result)]
    chosen += [ratio_table(result, name) for name in _compared_with(result)]
    if result["experiment"] == "long-context":
        chosen.append(gain_table(result))
    if result["agreement"]:
        chosen.append(agreement_table(result))
    if any(item["disagreements"] for item in result["agreement"]):
        chosen.append(disagreement_table(result))
    return chosen


def _each(result: dict[str, Any]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(arm, point, runs of all repeats) in the order of points, then arms."""
    places = [(arm["name"], point["name"]) for point in result["points"] for arm in result["arms"]]
    return [
        (arm, point, runs)
        for arm, point in places
        if (runs := [r for r in result["runs"] if r["arm"] == arm and r["point"] == point])
    ]


def _group_names(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Groups of several repeats, totals such as `turns 1+` last."""
    names = list(dict.fromkeys(name for run in runs for name in run["groups"]))
    return sorted(names, key=lambda name: name.endswith("+"))


def _middle(values: Sequence[float]) -> float:
    return float(statistics.median(values)) if values else 0.0


def _hits(parts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Cached tokens by tier, median of the repeats."""
    tiers = sorted({tier for part in parts for tier in part["hits"]})
    return {tier: _middle([part["hits"].get(tier, 0) for part in parts]) for tier in tiers}


def overview_table(result: dict[str, Any]) -> Table:
    """One row for every arm at every point: what a reader wants to know first about a chat."""
    rows = []
    for arm, point, runs in _each(result):
        first, later = (
            [run["groups"][name] for run in runs if name in run["groups"]]
            for name in ("turn 0", metrics.LATER_TURNS)
        )
        better = [
            f"{row['median']:.2f}"
            for row in result["ratios"]
            if (row["arm"], row["point"], row["group"]) == (arm, point, metrics.LATER_TURNS)
            and _against(result, row) == result["reference"]
        ]
        hits = sum(_hits(later).values()) / max(1.0, _middle([p["prompt_tokens"] for p in later]))
        rows.append(
            (
                *(point, arm, _ttft(first), _ttft(later), *(better or ["-"])),
                *(f"{hits:.0%}", _tbt([run["summary"] for run in runs])),
                _verdicts(result).get(arm, "not compared"),
            )
        )
    head = (
        *("point", "arm", "TTFT first turn", "TTFT later turns", "times better"),
        *("later tokens cached", "TBT median", "outputs"),
    )
    return Table("Overview", head, tuple(rows))


def _ttft(parts: Sequence[dict[str, Any]]) -> str:
    return seconds(_middle([part["median_ttft"] for part in parts])) if parts else "-"


def _verdicts(result: dict[str, Any]) -> dict[str, str]:
    """What the comparison of outputs said of every arm."""
    verdicts = {item["arm"]: item["verdict"] for item in result["agreement"]}
    return {**verdicts, result["reference"]: "reference"}


def group_table(result: dict[str, Any]) -> Table:
    """TTFT and cached tokens by group (turn or label)."""
    rows = []
    for arm, point, runs in _each(result):
        for name in _group_names(runs):
            parts = [run["groups"][name] for run in runs if name in run["groups"]]
            hits = _hits(parts)
            rows.append(
                (
                    *(point, arm, name),
                    seconds(_middle([part["median_ttft"] for part in parts])),
                    seconds(_middle([part["p90_ttft"] for part in parts])),
                    f"{_middle([part['prompt_tokens'] for part in parts]):.0f}",
                    ", ".join(f"{tier} {count:.0f}" for tier, count in hits.items() if count)
                    or "none",
                )
            )
    head = ("point", "arm", "group", "TTFT median", "TTFT p90", "prompt tokens", "cached tokens")
    return Table("Time to first token", head, tuple(rows))


def summary_table(result: dict[str, Any]) -> Table:
    """One row for every arm at every point."""
    verdicts = _verdicts(result)
    rows = []
    for arm, point, runs in _each(result):
        parts = [run["summary"] for run in runs]
        rows.append(
            (
                *(point, arm),
                str(sum(part["total_requests"] for part in parts)),
                str(sum(part["failed"] for part in parts)),
                f"{_middle([part['output_token_throughput'] for part in parts]):.1f}",
                f"{_middle([part['throughput'] for part in parts]):.2f}",
                _tbt(parts),
                f"{_middle([part['cache_hit_rate'] for part in parts]):.1%}",
                verdicts.get(arm, "not compared"),
            )
        )
    head = (
        *("point", "arm", "requests", "failed", "output tokens/s", "requests/s"),
        *("TBT median", "cached", "outputs"),
    )
    return Table("Whole runs", head, tuple(rows))


def _tbt(parts: Sequence[dict[str, Any]]) -> str:
    value = _middle([part["median_tbt"] for part in parts])
    return seconds(value) if value else "-"  # replies of one token have none


def _compared_with(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(_against(result, row) for row in result["ratios"]))


def _against(result: dict[str, Any], row: dict[str, Any]) -> str:
    """The arm a ratio compares with; results made before there could be several do not say."""
    return str(row.get("against", result["reference"]))


def ratio_table(result: dict[str, Any], against: str | None = None) -> Table:
    """How many times better than `against` (the reference), with the spread over the repeats."""
    against = against or result["reference"]
    rows = [
        (
            *(row["point"], row["arm"], row["group"], row["metric"]),
            f"{row['median']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            str(row["repeats"]),
        )
        for row in result["ratios"]
        if _against(result, row) == against
    ]
    head = ("point", "arm", "group", "metric", "times better", "range", "repeats")
    return Table(f"Against {against} (above 1 is better)", head, tuple(rows))


def gains(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Gain in average TTFT of every swept point, with the reference's device hit rate there.

    The average, not the median: where most requests hit the device, the median is such a hit in
    every arm and says nothing of the others.
    """
    found = []
    for point in result["points"]:
        if point["value"] is None:
            continue
        by_arm = {
            arm["name"]: [
                run["groups"][point["name"]]
                for run in result["runs"]
                if (run["arm"], run["point"]) == (arm["name"], point["name"])
            ]
            for arm in result["arms"]
        }
        base = by_arm.pop(result["reference"])
        for arm, groups in by_arm.items():
            better = [
                theirs["average_ttft"] / ours["average_ttft"]
                for theirs, ours in zip(base, groups, strict=True)
            ]
            found.append(
                {
                    **{"arm": arm, "value": point["value"], "better": _middle(better)},
                    "device_hit_rate": _middle([group["device_hit_rate"] for group in base]),
                }
            )
    return found


def gain_table(result: dict[str, Any]) -> Table:
    """Gain as a function of what the device still holds (HCache Fig. 15)."""
    rows = [
        (
            *(row["arm"], f"{row['value']:g}", f"{row['device_hit_rate']:.1%}"),
            f"{row['better']:.2f}",
        )
        for row in sorted(gains(result), key=lambda row: (row["arm"], row["device_hit_rate"]))
    ]
    head = (
        "arm",
        "Zipf skew",
        f"device hit rate of {result['reference']}",
        "average TTFT times better",
    )
    return Table("Gain by reuse on the device", head, tuple(rows))


def agreement_table(result: dict[str, Any]) -> Table:
    """Whether outputs are equal, token by token."""
    rows = [
        (
            *(item["arm"], str(item["compared"]), str(item["equal"])),
            *(str(item["after"]), item["verdict"]),
        )
        for item in result["agreement"]
    ]
    head = ("arm", "replies compared", "equal", "after a difference", "verdict")
    return Table(f"Greedy outputs against {result['reference']}", head, tuple(rows))


def disagreement_table(result: dict[str, Any], limit: int = 20) -> Table:
    """First differing token of every session that parted."""
    rows = [
        (
            *(item["arm"], item["point"], str(item["repeat"]), str(item["session"])),
            *(str(item["turn"]), str(item["position"]), str(item["prompt_len"])),
            f"{item['reference_token']} / {item['arm_token']}",
            "not asked" if item["margin"] is None else f"{item['margin']:.5f}",
            "near tie" if item["explained"] else "unexplained",
        )
        for agreement in result["agreement"]
        for item in agreement["disagreements"]
    ]
    head = (
        *("arm", "point", "repeat", "session", "turn", "position", "prompt tokens"),
        *("tokens", "logprob margin", "reading"),
    )
    return Table(f"Disagreements (first {limit})", head, tuple(rows[:limit]))


def loss_lines(result: dict[str, Any]) -> list[str]:
    """Where an arm is slower than the reference, or one sentence that nothing was seen."""
    return result["losses"] or ["no point of this run was slower than the reference"]


def varied_lines(result: dict[str, Any]) -> list[str]:
    """What changed between repeats and could not be held still."""
    loads = [run["load_average"] for run in result["runs"]]
    lines = [f"1-minute load average at the start of runs: {min(loads)} to {max(loads)}"]
    for arm in result["arms"]:
        if arm["start_s"]:
            times = ", ".join(f"{value:.0f} s" for value in arm["start_s"])
            lines.append(f"{arm['name']} started in {times}")
    if not all(run["flushed"] for run in result["runs"]):
        lines.append("a server has no /flush_cache: its cache was not emptied between points")
    lines += _without_restores(result)
    cold = [
        run["arm"]
        for run in result["runs"]
        if run["groups"].get("turn 0", {}).get("cache_hit_rate", 0.0) > 0.0
    ]
    if cold:
        lines.append(
            f"first turns found cached tokens ({', '.join(dict.fromkeys(cold))}): system prompts "
            "are shared, or the trace repeats itself"
        )
    return lines


def _without_restores(result: dict[str, Any]) -> list[str]:
    """A tier that brought nothing back was not measured; its numbers are recomputation."""
    if result["experiment"] == "overhead":
        return []
    lines = []
    for arm in result["arms"]:
        tiers = [run["summary"]["hits"] for run in result["runs"] if run["arm"] == arm["name"]]
        below = sum(hits.get("host", 0) + hits.get("storage", 0) for hits in tiers)
        if arm["name"] != result["reference"] and not below:
            lines.append(
                f"{arm['name']} brought nothing back from host or storage: its times are those of "
                "the device cache and of recomputation (is the KV pool too large to overflow?)"
            )
    return lines


def console(result: dict[str, Any]) -> str:
    """The whole report as text."""
    parts = [f"\n{machine.one_line(result['machine'])}"]
    parts += result["skipped"]
    for table in tables(result):
        parts.append(f"\n{table.title}\n{table.markdown()}")
    parts.append("\nWhere the tier does not pay")
    parts += [f"- {line}" for line in loss_lines(result)]
    parts.append("\nWhat varied")
    parts += [f"- {line}" for line in varied_lines(result)]
    return "\n".join(parts)


def headline(result: dict[str, Any]) -> list[str]:
    """One line for every arm: the median gain at turns after the first."""
    return [
        f"{row['arm']}, {row['point']}: TTFT after the first turn {row['median']:.2f} times "
        f"better than {_against(result, row)}"
        for row in result["ratios"]
        if row["group"] == metrics.LATER_TURNS and row["metric"] == "median_ttft"
    ]
