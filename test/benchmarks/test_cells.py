"""Cells: whole lines, whatever happened to their writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.harness import cells
from benchmark.harness.cells import FAILED, OK, CellFile, append, latest, read


def cell(key: str, status: str = OK, **values: Any) -> dict[str, Any]:
    return {"step": "s", "key": key, "status": status, "values": values}


def test_a_cell_says_where_it_was_measured_and_how_to_repeat_it(tmp_path: Path) -> None:
    file = CellFile(tmp_path / "cells", "drift", "python script.py --fast")
    file.add("drift/a", {"worst": 1 / 3, "rows": [1.23456789]}, 2.34567)
    (line,) = read(tmp_path / "cells")
    assert line["values"] == {"worst": 0.333333, "rows": [1.23457]}
    assert line["seconds"] == 2.346 and line["command"] == "python script.py --fast"
    assert line["commit"] and line["device"] and line["versions"]["torch"] and line["at"]
    assert file.has("drift/a") and not file.has("drift/b")
    assert CellFile(tmp_path / "cells", "drift").has("drift/a")


def test_a_failure_is_kept_and_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "cells"
    CellFile(path, "s").failed("a", "no such kernel", "x" * 10_000, 1.0)
    again = CellFile(path, "s")
    assert not again.has("a")
    assert len(read(path)[0]["values"]["log"]) == cells.LOG_TAIL
    again.add("a", {}, 1.0)
    again.failed("a", "later", "", 1.0)
    assert latest(read(path))["a"]["status"] == OK


@given(cut=st.integers(0, 200))
def test_a_half_line_is_skipped_and_the_next_one_is_whole(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cells") / "cells"
    append(path, cell("first", text="\u00e4" * 20))
    whole = path.read_bytes()
    path.write_bytes(whole + whole.replace(b"first", b"other")[: min(cut, len(whole))])
    append(path, cell("third"))
    keys = [line["key"] for line in read(path)]
    # Only the line end may be missing from a line that counts.
    assert keys in (["first", "third"], ["first", "other", "third"])
    assert (len(keys) == 3) == (cut >= len(whole) - 1)


def test_other_lines_are_no_cells(tmp_path: Path) -> None:
    path = tmp_path / "cells"
    path.write_text('[1]\n{"key": "a"}\n\nnonsense\n' + json.dumps(cell("a")) + "\n")
    assert [line["key"] for line in read(path)] == ["a"]
    assert read(tmp_path / "missing") == []


def test_of_several_lines_the_last_counts_but_no_failure_replaces_a_measurement() -> None:
    found = latest(
        [cell("a", FAILED), cell("b", n=1), cell("a", n=2), cell("b", FAILED), cell("b", n=3)]
    )
    assert list(found) == ["a", "b"]
    assert found["a"]["values"] == {"n": 2} and found["b"]["values"] == {"n": 3}


def test_a_line_has_a_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "cells"
    empty = len(json.dumps(cell("a", t=""), separators=(",", ":"))) + 1
    append(path, cell("a", t="x" * (cells.MAX_LINE - empty)))
    with pytest.raises(ValueError, match="the cell b has"):
        append(path, cell("b", t="x" * (cells.MAX_LINE - empty + 1)))
    assert [line["key"] for line in read(path)] == ["a"]


def test_without_a_file_nothing_is_kept() -> None:
    file = CellFile(None, "s")
    file.add("a", {}, 0.0)
    assert file.has("a")
