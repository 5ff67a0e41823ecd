"""The arithmetic of the overflow benchmarks: cuts, samples, comparisons, tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.cells import latest, read
from benchmark.quality import after_cut
from benchmark.quality import overflow_rows as rows
from benchmark.quality import overflow_table as table

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("head", [0, 4, 64])
def test_a_cut_keeps_half_a_window_and_its_head(head: int) -> None:
    left = table.kept(range(600), 512, head)
    assert len(left) == 256
    assert left[:head] == list(range(head))
    assert left[head:] == list(range(head + 256, 512))


def test_samples_are_of_both_kinds_and_spread() -> None:
    known = {kind: [(kind, i) for i in range(5000 + 10 * n)] for n, kind in enumerate(table.KINDS)}
    chosen = table.samples(10, known)
    assert [sample.kind for sample in chosen] == list(table.KINDS) * 5
    for kind in table.KINDS:
        of_kind = [sample.tokens for sample in chosen if sample.kind == kind]
        assert len({tokens[0] for tokens in of_kind}) == 5
        assert of_kind[0][0] == (kind, 0) and of_kind[-1][-1] == known[kind][-1]
        assert len(of_kind[-1]) == table.SPREAD >= max(table.WINDOWS) + table.CHUNK
        # What is scored reaches to the next cut, half a window further.
        longest = max(window + window // 2 for window in table.WINDOWS)
        assert {len(tokens) for tokens in of_kind[:-2]} == {longest}


def test_samples_of_the_book_are_spread_and_have_numbers_of_their_own() -> None:
    known = {table.BOOK: list(range(100_000))}
    many, few = table.of_book(20, known), table.of_book(8, known)
    assert many[:8] == few, "a longer run goes on from a shorter one"
    assert [sample.number for sample in few] == list(range(1000, 1008))
    for chosen in (many, few):
        assert {(sample.kind, len(sample.tokens)) for sample in chosen} == {("book", table.SIZE)}
        starts = sorted(sample.tokens[0] for sample in chosen)
        gaps = [b - a for a, b in zip(starts, [*starts[1:], 100_000 - table.SIZE], strict=True)]
        assert max(gaps) < 3 * min(gaps)


def test_rows_of_an_earlier_result_stay_until_there_are_better_ones() -> None:
    def row(arm: str, tokens: int, **more: Any) -> dict[str, Any]:
        place = {"dtype": "float32", "window": 512, "form": "kv", "arm": arm, "kind": "all"}
        return {**place, "tokens": tokens, **more}

    older = [row("ours 0", 64), row("ours 4", 64), row("ours 64", 128)]
    newer = [row("ours 4", 128, behind=None), row("ours 64", 64, behind=None)]
    newer.append(row("ours 64", 64, behind=[0, 64]))
    assert rows.merged(older, newer) == [older[0], newer[0], older[2], newer[2]]


def test_the_committed_times_after_a_cut_say_what_their_rows_say() -> None:
    result = json.loads((ROOT / "benchmark/results/cpu-after-cut.json").read_text())
    assert result["tables"] == after_cut.tables(result["rows"])
    moved, computed = (
        [row for row in result["rows"] if row["mode"] == mode] for mode in ("reembed", "recompute")
    )
    assert len(moved) == len(computed) == 7
    assert {row["prompt_tokens"] for row in result["rows"]} == {1076}
    assert {row["cached_tokens"] for row in moved} == {960}
    assert {row["cached_tokens"] for row in computed} == {64}
    assert float(result["tables"]["after-cut"]["rows"][1][-1]) >= 3


def test_the_committed_table_says_what_its_rows_say_and_those_what_the_cells_say() -> None:
    """Some rows were measured before cells were kept."""
    results = ROOT / "benchmark" / "results"
    result = json.loads((results / "cpu-overflow-table.json").read_text())
    assert result["tables"] == rows.tables(result["rows"])
    found = latest(read(results / "overflow-table.cells"))
    found["float32 kv 512 999"] = {"status": "failed", "values": {"reason": "", "log": ""}}
    made = rows.rows_of(found)
    assert len(made) == 177 and all(row in result["rows"] for row in made)
    assert rows.merged(made, result["rows"]) == rows.merged(result["rows"], made) == result["rows"]
