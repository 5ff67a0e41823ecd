"""The arithmetic of the overflow benchmarks: cuts, samples, comparisons, tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

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


def test_two_arms_are_compared_over_the_tokens_of_both() -> None:
    size = rows.CHUNK
    pairs = [([2.0 * size, 9.0 * size], [1.0 * size]), ([1.0 * size], [1.0 * size, 5.0 * size])]
    found = rows.compared(pairs)
    assert found.tokens == 2 * size
    assert found.perplexity == pytest.approx(math.exp(1.5))
    assert found.reference == pytest.approx(math.e)
    assert found.change == pytest.approx(math.exp(0.5) - 1)
    assert found.error == pytest.approx(math.exp(0.5) * math.sqrt(0.5) / math.sqrt(2))


def cell(kind: str, **arms: list[float]) -> dict[str, Any]:
    named = {arm.replace("_", " "): chunks for arm, chunks in arms.items()}
    return {"status": "ok", "values": {"kind": kind, "arms": named}}


def by_place(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(r["form"], r["arm"], r["kind"], str(r["behind"])): r for r in rows}


def test_an_arm_stands_against_recomputation_with_its_head() -> None:
    found = {
        "float32 kv 512 0": cell("prose", ours_64=[70.0], TT_64=[64.0], NKVT_64=[99.0], whole=[60]),
        "float32 kv 512 1": cell("reference", ours_64=[64.0], TT_64=[64.0]),
        "float32 hidden 512 0": cell("prose", ours_64=[71.0], TT_64=[65.0]),
        "float32 heads 512 0": cell("prose", TT_0=[60.0], ours_0=[90.0]),
        "float32 heads-hidden 512 0": cell("prose", TT_0=[60.0], ours_0=[91.0]),
        "float32 heads-mixed 512 0": cell("prose", ours_0=[92.0]),
        "float32 kv 512 2": {"status": "failed", "values": {"reason": "", "log": ""}},
    }
    made = by_place(rows.rows_of(found))
    every = made["kv", "ours 64", "all", "None"]
    assert (every["cuts"], every["against"], every["tokens"]) == (2, "TT 64", 128)
    for form in ("kv", "hidden"):
        change = made[form, "ours 64", "prose", "None"]["change"]
        assert change == pytest.approx(math.exp(6 / 64) - 1, rel=1e-5)
    for form, loss in (("kv", 30), ("hidden", 31), ("mixed", 32)):
        small = made[form, "ours 0", "all", "None"]
        assert (small["against"], small["cuts"]) == ("TT 0", 1)
        assert small["change"] == pytest.approx(math.exp(loss / 64) - 1, rel=1e-5)
    assert {made["kv", arm, "all", "None"]["against"] for arm in ("NKVT 64", "whole")} == {"TT 64"}
    assert not any(row["arm"] == row["against"] for row in made.values())
    tables = rows.tables(list(made.values()))
    assert all(
        len(cells) == len(one["columns"]) for one in tables.values() for cells in one["rows"]
    )
    (line,) = [cells for cells in tables["after-a-cut"]["rows"] if cells[2] == "64"]
    assert line[3] == "2" and line[-2] == "-", "mixed was not measured"
    assert line[-3].endswith(" (1 cuts)") and line[-4].count("cuts") == 0


def test_the_book_stands_for_itself() -> None:
    found = {
        "float32 kv 512 0": cell("prose", ours_64=[70.0], TT_64=[64.0]),
        "float32 kv 512 1": cell("reference", ours_64=[58.0], TT_64=[64.0]),
        "float32 book 512 1000": cell("book", ours_64=[65.0], TT_64=[64.0]),
        "float32 book 512 1001": cell("book", ours_64=[65.0], TT_64=[64.0]),
    }
    made = by_place(rows.rows_of(found))
    every = made["kv", "ours 64", "all", "None"]
    assert (every["cuts"], every["change"]) == (2, 0)
    tables = rows.tables(list(made.values()))
    assert [line[2] for line in tables["behind"]["rows"]] == ["all", "prose", "reference", "book"]
    changes = ["+9.83% ± 0.00%", "-8.95% ± 0.00%", "+1.57% ± 0.00% (2 cuts)"]
    assert tables["by-text"]["rows"] == [["float32", "512", "64", *changes]]


def test_moved_state_is_compared_by_the_distance_behind_the_cut() -> None:
    found = {
        "float32 kv 512 0": cell("prose", ours_64=[70.0, 64.0, 64.0, 68.0], TT_64=[64.0] * 4),
        "float32 kv 512 1": cell("prose", ours_64=[66.0, 65.0], TT_64=[64.0] * 2),
    }
    made = by_place(rows.rows_of(found))
    parts = {
        place[3]: (row["cuts"], row["tokens"], math.log1p(row["change"]) * row["tokens"])
        for place, row in made.items()
        if place[2] == "all"
    }
    assert parts == {
        "None": (2, 384, pytest.approx(13, rel=1e-4)),
        "[0, 64]": (2, 128, pytest.approx(8, rel=1e-4)),
        "[64, 128]": (2, 128, pytest.approx(1, rel=1e-4)),
        "[128, 256]": (1, 128, pytest.approx(4, rel=1e-4)),
    }


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


def test_the_committed_table_says_what_its_rows_say() -> None:
    result = json.loads((ROOT / "benchmark/results/cpu-overflow-table.json").read_text())
    assert result["tables"] == rows.tables(result["rows"])
    assert rows.merged(result["rows"], []) == result["rows"]
