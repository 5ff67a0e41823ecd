"""The whole campaign with tiny models on a CPU, as its first command on a GPU would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import ROOT
from benchmark.gpu.published import publish
from benchmark.gpu.steps import STEPS
from sglang_hc.tools.bench import report
from sglang_hc.tools.bench.cells import latest, read

MINUTES = 45
"""Nine times what it takes on two cores beside other tests; its steps have limits of their own."""

pytestmark = [
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.timeout(60 * MINUTES),
    pytest.mark.usefixtures("models"),
]


def rehearse(output: Path) -> int:
    words = [sys.executable, "-m", "benchmark.gpu.campaign", "--rehearse", "--output", str(output)]
    return subprocess.run([*words, "--minutes", str(MINUTES)], check=False, cwd=ROOT).returncode


def test_a_rehearsal_measures_every_kind_of_cell(tmp_path: Path) -> None:
    assert rehearse(tmp_path) == 0, (tmp_path / "log.txt").read_text()[-8000:]
    found = latest(read(tmp_path / "cells.jsonl"))
    ended = {cell["status"] for cell in found.values()}
    assert ended == {"ok", "left out"}
    ran = [step for step in STEPS if step.rehearsal is not None]
    assert all(found[step.key]["status"] == "ok" for step in ran)
    kinds = {cell["step"] for cell in found.values()}
    assert kinds == {
        *("campaign", "device", "checked", "drift", "restore", "multi-turn", "capture", "smoke"),
        "overhead",
    }
    for cell in found.values():
        assert cell["commit"] and cell["device"].endswith("no GPU") and cell["command"], cell["key"]
        assert len(json.dumps(cell)) < 32_000
    files = list(tmp_path.iterdir())
    assert len(files) <= 8 and all(file.stat().st_size < 16 << 20 for file in files)
    page = (tmp_path / "report.html").read_text()
    assert "shows that everything runs, and no speed" in page
    assert page.count("data:image/png;base64,") >= 3 and "Restorations" in page

    # From the cells alone: what make_tables.py reads.
    written = publish(tmp_path / "cells.jsonl", tmp_path)
    assert all(path.name.startswith("rehearsal-") for path in written)
    chat = json.loads((tmp_path / "rehearsal-multi-turn-llama-2-7b.json").read_text())
    assert [row[1] for row in report.overview_table(chat).rows] == ["stock", "auto"]
    hits = {run["arm"]: run["summary"]["hits"] for run in chat["runs"]}
    assert hits["auto"].get("host", 0) > 0 == hits["stock"].get("host", 0)

    # A second call has nothing to do.
    before = (tmp_path / "cells.jsonl").read_bytes()
    assert rehearse(tmp_path) == 0
    assert (tmp_path / "cells.jsonl").read_bytes() == before
