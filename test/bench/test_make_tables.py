"""Published tables come from committed results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmark" / "make_tables.py"

PAGE = """# Results

<!-- table: one.json speeds -->
old
<!-- /table -->

after
"""


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--root", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


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
    assert run(tmp_path, "--check").returncode == 1
    assert page.read_text() == PAGE
    assert run(tmp_path).returncode == 0
    text = page.read_text()
    assert "| hidden | 7    |" in text and "old" not in text and text.endswith("after\n")
    assert run(tmp_path, "--check").returncode == 0


def test_a_mark_without_its_result_is_an_error(tmp_path: Path) -> None:
    tree(tmp_path, PAGE.replace("one.json", "two.json"))
    done = run(tmp_path, "--check")
    assert done.returncode == 1 and "two.json" in done.stderr


def test_a_mark_with_an_unknown_name_says_what_there_is(tmp_path: Path) -> None:
    tree(tmp_path, PAGE.replace("speeds", "sizes"))
    done = run(tmp_path)
    assert done.returncode == 1 and "it has speeds" in done.stderr


def test_the_tables_of_this_repository_are_fresh() -> None:
    done = run(SCRIPT.parents[1], "--check")
    assert done.returncode == 0, done.stdout + done.stderr
