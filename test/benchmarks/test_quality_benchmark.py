"""The arithmetic of benchmark/quality: windows, comparisons, tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmark.quality import real_text
from benchmark.quality import run as quality

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12])
def test_windows_are_whole_and_of_all_texts(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"declaration.txt": 2000, "constitution.txt": 10000, "devils-dictionary.txt": 576}
    texts = {name: [(name, i) for i in range(size)] for name, size in sizes.items()}
    monkeypatch.setattr(real_text, "tokens_of", lambda model, name: texts[name])
    chosen = quality.windows(count)
    assert len(chosen) == count
    for number, (history, following) in enumerate(chosen):
        assert len(history) == quality.HISTORY and len(following) == quality.CONTINUATION
        name, first = history[0]
        assert name == quality.TEXTS[number % 3]
        assert [*history, *following] == texts[name][first : first + len(history) + len(following)]
    starts = [history[0] for history, _ in chosen if history[0][0] == "constitution.txt"]
    assert len(set(starts)) == len(starts)
    if len(starts) > 1:  # spread over the whole text
        assert starts[-1][1] == sizes["constitution.txt"] - quality.HISTORY - quality.CONTINUATION


def raw(arm: str, logprobs: list[float], replies: list[list[int]], **drift: float) -> Any:
    return {"arm": arm, "logprobs": logprobs, "replies": replies, "drift": [drift] if drift else []}


def test_an_arm_is_compared_token_by_token() -> None:
    reference = raw("never evicted", [-1.0, -2.0], [[1, 2], [3]])
    hidden = raw("hidden", [-1.5, -1.9], [[1, 2], [4]], worst=1e-3, mean=2e-3, outliers=40.0)
    row = quality.compared(hidden, reference, "bfloat16")
    assert row["perplexity"] == pytest.approx(math.exp(1.7))
    assert row["reference_perplexity"] == pytest.approx(math.exp(1.5))
    assert row["mean_difference"] == pytest.approx(0.3)
    assert row["largest_difference"] == pytest.approx(0.5)
    assert (row["replies_equal"], row["replies"]) == (1, 2)
    plain = quality.compared(reference, reference, "bfloat16")
    tables = quality.tables([plain, row])
    assert [cells[1] for cells in tables["quality"]["rows"]] == ["never evicted", "hidden"]
    assert [cells[1] for cells in tables["drift"]["rows"]] == ["hidden"]
    assert all(
        len(cells) == len(table["columns"]) for table in tables.values() for cells in table["rows"]
    )


def test_lists_of_other_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError):
        quality.compared(raw("kv", [-1.0], [[1]]), raw("x", [-1.0, -2.0], [[1]]), "float32")


def test_the_committed_result_says_what_its_rows_say() -> None:
    result = json.loads((ROOT / "benchmark/results/cpu-quality.json").read_text())
    assert result["tables"] == quality.tables(result["rows"])
    arms = {row["arm"] for row in result["rows"]}
    assert arms == {quality.REFERENCE, "recompute", *quality.FORMS}
    assert {row["dtype"] for row in result["rows"]} == {"float32", "bfloat16", "float16"}
    copies = [row for row in result["rows"] if row["arm"] == "kv"]
    assert all(row["largest_difference"] == 0 == row["worst_drift"] for row in copies)
