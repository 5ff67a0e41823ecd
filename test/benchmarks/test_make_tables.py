"""Published tables come from committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark import make_tables

PAGE = """# Results

<!-- table: one.json speeds -->
old
<!-- /table -->

after
"""


def run(root: Path, *words: str) -> int:
    return make_tables.main(["--root", str(root), *words])


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


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("two.json speeds", "two.json"),
        ("one.json sizes", "it has speeds"),
        ("one.json speeds: MB/s", "MB/s are not among arm, GB/s"),
    ],
)
def test_a_mark_that_asks_for_what_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mark: str, said: str
) -> None:
    tree(tmp_path, PAGE.replace("one.json speeds", mark))
    assert run(tmp_path) == 1
    assert said in capsys.readouterr().err


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


def test_a_table_that_nothing_checks_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tree(tmp_path, "| speed | MB/s |\n|---|---|\n| reads | 7 |\n")
    assert run(tmp_path, "--check") == 1
    assert "benchmark/README.md: nothing checks | speed | MB/s |" in capsys.readouterr().out
    page.write_text("<!-- table: own -->\n| speed | MB/s |\n|---|---|\n<!-- end -->\n")
    assert run(tmp_path, "--check") == 0


def test_a_table_that_a_test_reads_does_not_speak_for_others_of_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path, "")
    head, test = "| flag | default | meaning |", "test/test_flags_page.py"
    page, reader = tmp_path / "docs" / "flags.md", tmp_path / test
    page.parent.mkdir()
    reader.parent.mkdir()
    page.write_text(f"{head}\n|---|---|---|\n\n| speed | MB/s |\n|---|---|\n")
    reader.write_text("PAGE = 'flags.md'\n")
    assert run(tmp_path, "--check") == 1
    said = capsys.readouterr().out
    assert "nothing checks | speed | MB/s |" in said and head not in said
    reader.write_text("PAGE = 'another.md'\n")
    assert run(tmp_path, "--check") == 1
    assert f"nothing checks {head}" in capsys.readouterr().out
