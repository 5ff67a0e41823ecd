"""What restorations and capture have to reach, line by line, from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SINGLE = ("recompute", "kv", "hidden")
RIVALS = {"llama-2-7b": {"kv": 2.1, "recompute": 4.4}}
"""HCache, Table 1 and Fig. 8 for the multi-head shape; for the others: never slower."""
OF_BOUND = 0.9
CAPTURE = 1.01
"""Time between tokens with capture over without."""


def restore_lines(rows: Sequence[dict[str, Any]], shape: str) -> list[str]:
    """One line per goal, kind of slots and history: met, or missed. Rows from disk and rows whose
    rivals are missing say nothing."""
    table = {(r["slots"], r["history"], r["arm"]): r for r in rows if r["source"] != "disk"}
    lines = []
    for slots, history in sorted({key[:2] for key in table}):
        arms = {arm: row for (s, h, arm), row in table.items() if (s, h) == (slots, history)}
        single = [arm for arm in SINGLE if arm in arms]
        if "mix" not in arms or not single:
            continue
        mix, goals = arms["mix"], RIVALS.get(shape, {})
        best = min(single, key=lambda arm: float(arms[arm]["seconds"]))
        where = f"{history} tokens in {slots} slots"
        for rival, wanted in ({best: 1.0} | goals).items():
            if rival in arms:
                ratio = arms[rival]["seconds"] / mix["seconds"]
                lines.append(
                    f"{_met(ratio >= wanted)}: {where}, {ratio:.2f} times {rival}, goal {wanted:g}"
                )
        share = mix["of_bound"]
        lines.append(
            f"{_met(share >= OF_BOUND)}: {where}, {share:.2f} of its bound, goal {OF_BOUND:g}"
        )
    return lines


def capture_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line per batch."""
    return [
        f"{_met(row['ratio'] <= CAPTURE)}: batch {row['batch']}, {1e3 * row['on_s']:.3f} ms with "
        f"capture, {1e3 * row['off_s']:.3f} without, {row['ratio']:.4f} times (goal {CAPTURE:g})"
        for row in rows
    ]


def _met(good: bool) -> str:
    return "met" if good else "MISSED"
