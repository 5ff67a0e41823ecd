"""The whole campaign with tiny models on a CPU, as its first command on a GPU would run it.

`make nightly` runs that command as it is typed; `make test` the same steps, forked and with one
real server, which takes a fifth of the time (`support.forked_steps`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmark import ROOT
from benchmark.gpu import campaign
from benchmark.gpu.published import publish
from benchmark.gpu.steps import STEPS
from benchmark.harness import report
from benchmark.harness.cells import latest, read
from support.forked_steps import fork_steps

MINUTES = 45
"""Many times what it takes on two cores beside other tests; its steps have limits of their own."""

pytestmark = [
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.timeout(60 * MINUTES),
    pytest.mark.usefixtures("models"),
]


def words(output: Path) -> list[str]:
    return ["--rehearse", "--output", str(output), "--minutes", str(MINUTES)]


def as_typed(output: Path, patch: pytest.MonkeyPatch) -> int:
    """Returns the exit status."""
    command = [sys.executable, "-m", "benchmark.gpu.campaign", *words(output)]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


def forked(output: Path, patch: pytest.MonkeyPatch) -> int:
    patch.setattr(signal, "signal", lambda *_: None)
    fork_steps(patch)
    return campaign.main(words(output))


@pytest.mark.parametrize("rehearse", [forked, pytest.param(as_typed, marks=pytest.mark.slow)])
def test_a_rehearsal_measures_every_kind_of_cell(
    tmp_path: Path, rehearse: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rehearse(tmp_path, monkeypatch) == 0, (tmp_path / "log.txt").read_text()[-8000:]
    found = latest(read(tmp_path / "cells.jsonl"))
    ended = {cell["status"] for cell in found.values()}
    assert ended == {"ok", "left out"}
    ran = [step for step in STEPS if step.rehearsal is not None]
    assert all(found[step.key]["status"] == "ok" for step in ran)
    kinds = {cell["step"] for cell in found.values()}
    assert kinds == {
        *("campaign", "device", "checked", "drift", "restore", "multi-turn", "capture", "smoke"),
        *("overhead", "throughput", "returning"),
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
    assert hits["auto"].get("host", 0) > 0
    assert rehearse is forked or not hits["stock"].get("host", 0)  # a fake knows no arms

    # A second call has nothing to do.
    before = (tmp_path / "cells.jsonl").read_bytes()
    assert rehearse(tmp_path, monkeypatch) == 0
    assert (tmp_path / "cells.jsonl").read_bytes() == before
