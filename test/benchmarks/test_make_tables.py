"""Published tables come from committed results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmark" / "make_tables.py"

PAGE = """# Results

<!-- table: one.json speeds -->
old
<!-- /table -->

after
"""


def run(root: Path, *words: str) -> int:
    spec = importlib.util.spec_from_file_location("make_tables", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return int(script.main(["--root", str(root), *words]))


def tree(root: Path, page: str = PAGE) -> Path:
    results = root / "benchmark" / "results"
    results.mkdir(parents=True)
    tables = {"speeds": {"columns": ["arm", "GB/s"], "rows": [["kv", 3.5], ["hidden", 7]]}}
    (results / "one.json").write_text(json.dumps({"tables": tables}))
    target = root / "benchmark" / "README.md"
    target.write_text(page)
    return target


def test_a_stale_table_fails_the_check_and_is_rewritten(tmp_path: Path) -> None:
    page = tree(tmp_path)
    assert run(tmp_path, "--check") == 1
    assert page.read_text() == PAGE
    assert run(tmp_path) == 0
    text = page.read_text()
    assert "| hidden | 7    |" in text and "old" not in text and text.endswith("after\n")
    assert run(tmp_path, "--check") == 0


def test_a_mark_without_its_result_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path, PAGE.replace("one.json", "two.json"))
    assert run(tmp_path, "--check") == 1
    assert "two.json" in capsys.readouterr().err


def test_a_mark_with_an_unknown_name_says_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path, PAGE.replace("speeds", "sizes"))
    assert run(tmp_path) == 1
    assert "it has speeds" in capsys.readouterr().err


def test_a_mark_may_choose_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tree(tmp_path, PAGE.replace("speeds", "speeds: GB/s"))
    assert run(tmp_path) == 0
    assert "| GB/s |\n" in page.read_text() and "hidden" not in page.read_text()
    page.write_text(PAGE.replace("speeds", "speeds: MB/s"))
    assert run(tmp_path) == 1
    assert "MB/s are not among arm, GB/s" in capsys.readouterr().err


def test_a_link_that_leads_nowhere_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tree(
        tmp_path, "# The queue's *order*\n\n[here](#the-queues-order), [home](../README.md)\n"
    )
    (tmp_path / "README.md").write_text(
        "[there](benchmark/README.md#the-queues-order), [its folder](benchmark#the-queues-order)\n"
    )
    assert run(tmp_path, "--check") == 0
    page.write_text("[gone](../docs/gone.md), [no heading](../README.md#here), `queue/gone.py`\n")
    assert run(tmp_path, "--check") == 1
    said = capsys.readouterr().out
    assert "(../docs/gone.md) leads nowhere" in said
    assert "(../README.md#here) leads nowhere" in said
    assert "benchmark/README.md: there is no queue/gone.py" in said
    assert "README.md: (benchmark/README.md#the-queues-order) leads nowhere" in said


def test_the_tables_and_links_of_this_repository_are_sound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = run(SCRIPT.parents[1], "--check")
    assert status == 0, "".join(capsys.readouterr())


def test_medians_of_costs_become_tables(tmp_path: Path) -> None:
    def rates(store: list[int]) -> dict[str, object]:
        place = {"workload": "read", "directories": 1, "depth_per_directory": 2}
        return {**place, "store_mb_s": store, "fio_mb_s": [8, 9, 700]}

    cost = {"stock": {"median_us": 9.6}, "ours": {"median_us": 11.4}, "case": "all there"}
    passes = [{"disk": True, "schedule": "ready-first", "nothing new": {"median_us": 3.4}}]
    hooks = {
        "idle": {"1 running": {"median_us": 6.72}},
        "match": {"cases": [cost]},
        "evict": {"cases": [cost]},
        "queue": {"passes": passes},
    }
    old = {
        **hooks,
        "idle": {"1 running": {"median_us": 9.1}},
        "machine": {"commit": "0123456789ab"},
    }
    one = {
        **hooks,
        "throughput": [rates([100, 5, 6])],
        "old_commit": {**old, "throughput": [rates([1, 2, 3])]},
        "sources": {"slow": {"layer_plan": "kv:2", "seconds": {"kv": 0.25}}},
    }
    names = ("hooks", "hooks-queue", "fio", "sources")
    page = tree(tmp_path, "".join(PAGE.replace("speeds", name) for name in names))
    (tmp_path / "benchmark" / "results" / "one.json").write_text(json.dumps(one))
    assert run(tmp_path) == 0
    cells = [[cell.strip() for cell in line.split("|")] for line in page.read_text().splitlines()]
    for row in (
        ["cost", "us", "us of stock", "us at 0123456"],
        ["pass with nothing to do, 1 running", "7", "", "9"],
        ["evict: all there", "11", "10", "11"],
        ["with a disk, ready-first", "3, 3", "", ""],
        ["1 x 2", "6, 2, 9"],
        ["slow", "kv:2", "250"],
    ):
        assert ["", *row, ""] in cells
