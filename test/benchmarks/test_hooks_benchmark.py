"""benchmark/hooks: every workload runs, with the tree as it is now."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmark.hooks import run, waiting


def test_every_workload_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAITING", 30)
    monkeypatch.setattr(run, "LEAVES", 120)
    monkeypatch.setattr(sys, "argv", [run.__file__])
    path = tmp_path / "hooks.json"
    run.main(["--passes", "20", "--rounds", "2", "--blocks", "200", "--out", str(path)])
    found = json.loads(path.read_text())
    assert found["command"] == "python -m benchmark.hooks.run"
    assert len(found["idle"]) == 2 and len(found["match"]["cases"]) == 5
    assert [len(row) for row in found["queue"]["passes"]] == [4, 4, 6, 6]
    assert len(found["evict"]["cases"]) == 2 and found["memory"]["bytes_per_block"] > 0
