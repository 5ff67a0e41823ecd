"""A result on one screen: one table, one text plot, one sentence. report.html has the rest."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.harness import metrics, report
from benchmark.harness.report import Table

WIDTH = 100
"""Columns of the screen."""

_ANSWER_LINES = 2

_COLUMNS = {
    # column of report.overview_table: its name here
    "arm": "server",
    "TTFT first turn": "TTFT first turn",
    "TTFT later turns": "later turns",
    "times better": "times better",
    "later tokens cached": "later tokens cached",
    "outputs": "same words",
}


def one_screen(result: dict[str, Any], plots: Sequence[Path], output: Path) -> str:
    """Text for a chat at one point of a sweep: about 12 lines, and one for every arm of every turn.

    `plots`: the files that were drawn; the one of times by turn is named.
    """
    picture = next((path for path in plots if path.stem == "ttft_by_group"), None)
    notes = [line for note in result["skipped"] for line in textwrap.wrap(note, WIDTH)]
    parts = [
        "",
        *notes,
        *conversation(result),
        *table(result).markdown().splitlines(),
        "",
        *bars(result),
        "",
        *sentence(result),
    ]
    if picture is not None:
        parts.append(f"plot:   {picture}")
    parts.append(f"report: {output / 'report.html'}")
    return "\n".join(parts)


def table(result: dict[str, Any]) -> Table:
    """What a reader wants to know first of every arm, without what the demo leaves out."""
    whole = report.overview_table(result)
    places = [whole.head.index(name) for name in _COLUMNS]
    rows = tuple(tuple(row[place] for place in places) for row in whole.rows)
    return Table(whole.title, tuple(_COLUMNS.values()), rows)


def conversation(result: dict[str, Any]) -> list[str]:
    """What was asked and answered in the first conversation; empty where nobody can read it."""
    lines = []
    for turn in result.get("conversation", []):
        lines.append(textwrap.shorten(f"> {turn['question']}", WIDTH, placeholder=" ..."))
        lines += textwrap.wrap(turn["answer"], WIDTH, max_lines=_ANSWER_LINES, placeholder=" ...")
    return [*lines, ""] if lines else []


def bars(result: dict[str, Any]) -> list[str]:
    """Median time to the first token by turn, one bar for every arm."""
    medians = {
        (name, run["arm"]): float(group["median_ttft"])
        for run in result["runs"]
        for name, group in run["groups"].items()
        if name != metrics.LATER_TURNS
    }
    arm_width = max(len(arm) for _, arm in medians)
    turn_width = max(len(name) for name, _ in medians)
    label_width = max(len(report.seconds(value)) for value in medians.values())
    room = WIDTH - turn_width - arm_width - label_width - len("    ")
    longest = max(medians.values())
    lines, before = ["Time to the first token, median:"], ""
    turns = list(dict.fromkeys(name for name, _ in medians))
    for name, arm in sorted(medians, key=lambda key: turns.index(key[0])):
        value = medians[name, arm]
        bar = "█" * max(1, round(room * value / longest))
        shown = name if name != before else ""
        lines.append(f"{shown:{turn_width}}  {arm:{arm_width}} {bar} {report.seconds(value)}")
        before = name
    return lines


def sentence(result: dict[str, Any]) -> list[str]:
    """What was seen, in one sentence, as lines: gains of every arm, and whether words differ."""
    gains = [
        f"{row['median']:.1f} times as fast ({row['arm']})"
        for row in result["ratios"]
        if row["group"] == metrics.LATER_TURNS and row["metric"] == "median_ttft"
    ]
    words = [
        f"{item['equal']} of {item['compared']} replies are equal ({item['arm']})"
        for item in result["agreement"]
    ]
    told = (
        f"Against {result['reference']}, the first token of later turns comes {' and '.join(gains)}"
    )
    return textwrap.wrap("; ".join([told, *words]) + ".", WIDTH)
