"""The campaign: steps that fail, hang or are killed, minutes that run out, calls that go on."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sglang_hc
from benchmark.gpu import campaign, install, published, runner
from benchmark.gpu.steps import CALL_MINUTES, CALLS, STEPS
from benchmark.harness.cells import latest, read
from support import campaign_steps
from support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(campaign_steps.__file__)
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "test")])}
"""Where a script finds the campaign, and the campaign its steps."""
KEYS = {
    *(f"fake/one/{n}" for n in range(4)), *(f"fake/two/{n}" for n in range(3)),
    *(f"fake/three/{n}" for n in range(5)), "step one", "step two", "step three",
}  # fmt: skip


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a campaign of (name, cells, minutes) steps in this process; returns its exit status."""
    monkeypatch.setattr(runner, "GRACE_S", 0.2)
    monkeypatch.setenv("PYTHONPATH", PATHS["PYTHONPATH"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*kinds: tuple[str, int, float], words: tuple[str, ...] = ()) -> int:
        return campaign.main(["--output", str(tmp_path), *words], campaign_steps.steps(*kinds))

    return run


@pytest.fixture
def stopped_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the campaign time stands still until the step that hangs has measured its cell; then ten
    minutes have passed."""
    cells = tmp_path / "cells.jsonl"

    def monotonic() -> float:
        return 600.0 * (cells.is_file() and "fake/hangs/0" in cells.read_text())

    for module in (install, runner):
        stopped = SimpleNamespace(monotonic=monotonic, strftime=time.strftime)
        monkeypatch.setattr(module, "time", stopped)


def ends(folder: Path) -> dict[str, str]:
    return {
        key.removeprefix("step "): cell["status"]
        for key, cell in latest(read(folder / "cells.jsonl")).items()
        if cell["step"] == "campaign"
    }


def test_a_failing_step_leaves_its_reason_and_the_next_one_runs(call: Any, tmp_path: Path) -> None:
    assert call(("fails", 3, 0.01), ("one", 2, 0.01)) == 1
    assert ends(tmp_path) == {"fails": "failed", "one": "ok"}
    found = latest(read(tmp_path / "cells.jsonl"))
    assert found["step fails"]["values"]["reason"] == "exit status 3"
    assert "the last words" in found["step fails"]["values"]["log"]
    assert {"fake/fails/0", "fake/one/0", "fake/one/1"} < found.keys()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["cells.jsonl", "log.txt", "report.html"]
    page = (tmp_path / "report.html").read_text()
    assert "exit status 3" in page and "the last words" in page


def test_a_failed_step_is_tried_again_after_the_others(call: Any, tmp_path: Path) -> None:
    kinds = (("fails", 2, 0.01), ("one", 1, 0.01))
    assert call(kinds[0]) == 1
    steps = campaign_steps.steps(*kinds)
    order = runner.in_order(steps, tmp_path / "cells.jsonl")
    assert [step.name for step in order] == ["one", "fails"]
    # The second call skips the cell that is there, fails at the next one, and a third is through.
    assert call(*kinds) == 1 and call(*kinds) == 0
    assert ends(tmp_path) == {"fails": "ok", "one": "ok"}
    assert call(*kinds) == 0


@pytest.mark.usefixtures("stopped_clock")
def test_a_hanging_step_is_killed_at_its_limit(call: Any, tmp_path: Path) -> None:
    assert call(("hangs", 1, 0.01), ("one", 1, 0.01)) == 1
    found = latest(read(tmp_path / "cells.jsonl"))
    assert found["step hangs"]["values"]["reason"].startswith("killed at its limit")
    assert "fake/hangs/0" in found and ends(tmp_path)["one"] == "ok"


@pytest.mark.usefixtures("stopped_clock")
def test_minutes_are_a_hard_budget(call: Any, tmp_path: Path) -> None:
    """What does not fit is not begun; what runs is stopped in time for the page."""
    seconds = runner.RESERVE_S + 3
    words = ("--minutes", f"{seconds / 60}")
    assert call(("long", 1, 1.0), ("hangs", 1, 0.01), words=words) == 0
    assert ends(tmp_path) == {"hangs": "stopped"}
    assert "the minutes ran out" in (tmp_path / "report.html").read_text()
    assert call(("long", 1, 0.01), words=("--minutes", "0.25")) == 2
    assert call(("long", 1, 0.01), words=("--minutes", "0.3")) == 0
    assert ends(tmp_path)["long"] == "ok"


def test_what_writes_a_lot_leaves_a_small_log(call: Any, tmp_path: Path) -> None:
    assert call(("loud", 1, 0.01)) == 0
    assert (tmp_path / "log.txt").stat().st_size == runner.STEP_LOG


def test_done_cells_are_taken_over_by_a_fresh_folder(call: Any, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.jsonl"
    assert call(("one", 2, 0.01)) == 0
    (tmp_path / "cells.jsonl").rename(earlier)
    assert call(("one", 2, 0.01), ("two", 1, 0.01), words=("--done", str(earlier))) == 0
    lines = read(tmp_path / "cells.jsonl")
    assert [line["key"] for line in lines] == [
        "fake/one/0", "fake/one/1", "step one", "fake/two/0", "step two"
    ]  # fmt: skip
    assert lines[:3] == read(earlier)


def test_wrong_use_is_told_in_one_sentence(call: Any, tmp_path: Path, capsys: Any) -> None:
    assert call(("one", 1, 0.01), words=("--done", str(tmp_path / "none"))) == 2
    assert call(("one", 1, 0.01), words=("--only", "two")) == 2
    assert call(("one", 1, 0.01), words=("--page", str(tmp_path / "none"))) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and all(line.startswith("campaign.py: ") for line in said)


def test_the_list_leaves_out_what_is_done(call: Any, tmp_path: Path, capsys: Any) -> None:
    kinds = (("one", 1, 0.5), ("two", 1, 2.0))
    assert call(*kinds, words=("--list",)) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["one", "0.5", "0.5"], ["two", "2.0", "2.5"]
    ]  # fmt: skip
    assert call(kinds[0], words=("--minutes", "1")) == 0
    capsys.readouterr()
    assert call(*kinds, words=("--list",)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["two"]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]
)
def test_killed_at_any_moment_and_called_again_it_ends_with_the_same_cells(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    environment = {**os.environ, **PATHS}
    done, output = [], tmp_path
    for attempt in range(3):
        output = tmp_path / str(attempt)
        words = [sys.executable, str(DRIVER), "--output", str(output), "--rehearse"]
        words += [word for file in done for word in ("--done", str(file))]
        process = subprocess.Popen(words, env=environment, start_new_session=True)
        if attempt == 2:
            assert process.wait(HANGS_S) == 0
            break
        time.sleep(rng.uniform(0.1, 2.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        cells = output / "cells.jsonl"
        if cells.is_file():
            if rng.random() < 0.5:  # as if the kill had come in the middle of a line
                os.truncate(cells, max(0, cells.stat().st_size - rng.randrange(1, 60)))
            done.append(cells)
    assert latest(read(output / "cells.jsonl")).keys() == KEYS
    assert not running(str(tmp_path)), "a step outlived its campaign"


def running(word: str) -> list[str]:
    """Command lines of this machine's processes that hold a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found


def test_the_steps_have_names_and_limits_of_their_own() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert importlib.util.find_spec(step.command[0]) is not None, step.command
        assert step.expected_s(False) < step.limit_s(False) <= 600 + 60
    # Correctness first; everything that is not measured twice is rehearsed or needs a GPU.
    assert [step.name for step in STEPS[:3]] == ["device", "drift", "restore-7b"]
    scripts = {step.command[0] for step in STEPS}
    rehearsed = {s.command[0] for s in STEPS if s.rehearsal is not None or s.gpu_only}
    assert scripts == rehearsed


def test_a_bundle_is_sourced_where_sglang_is_missing(tmp_path: Path) -> None:
    """Without site-packages there is no sglang; env.sh brings a folder that has one."""
    site = tmp_path / "site" / "sglang"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("")
    (tmp_path / "env.sh").write_text(
        f'export PYTHONPATH="{tmp_path}/site:$PYTHONPATH"\nSGL_FLAGS="--attention-backend triton"\n'
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\nfrom benchmark.gpu import install\n"
        "problem = install.ensure(Path(sys.argv[1]), [sys.argv[0], sys.argv[1]])\n"
        "print(problem or f'flags {install.server_args()}')\n"
    )

    def run(bundle: str) -> str:
        # -S: no site-packages. The second interpreter, behind env.sh, has them, and the fake.
        words = [sys.executable, "-S", str(script), str(tmp_path / bundle)]
        environment = {"PATH": os.environ["PATH"], **PATHS}
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=HANGS_S, check=True
        ).stdout

    assert run(".") == "flags --attention-backend triton\n"
    assert "has no env.sh" in run("nothing")


def test_flags_without_a_bundle_follow_from_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SGL_FLAGS", raising=False)
    monkeypatch.delenv("SGLANG_IS_FLASHINFER_AVAILABLE", raising=False)
    assert install.server_args() == ""
    monkeypatch.setenv("SGLANG_IS_FLASHINFER_AVAILABLE", "0")
    assert install.server_args() == install.TRITON_FLAGS


def test_the_entry_point_is_the_one_that_pip_installs(tmp_path: Path) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    name, _, target = install.ENTRY.partition(" = ")
    assert f'[project.entry-points."{install.PLUGINS}"]\n{name} = "{target}"' in project
    folder = install.entry_point(tmp_path)
    code = (
        "from importlib.metadata import entry_points as e, version as v\n"
        f"print([p.value for p in e(group={install.PLUGINS!r}) if p.name == 'hc'], v('sglang-hc'))"
    )
    words = [sys.executable, "-S", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"['{target}'] {sglang_hc.__version__}\n"


def test_results_are_what_make_tables_reads(tmp_path: Path) -> None:
    row = {
        **{"shape": "llama-2-7b", "slots": "adjacent", "history": 1024, "source": "host"},
        **{"arm": "kv", "seconds": 0.01, "of_bound": 0.9, "runs_as": "kv:32"},
    }
    where = {"device": "NVIDIA H100, 81559 MiB, 580", "commit": "c", "versions": {}, "at": "now"}
    line = {"step": "restore", "key": "k", "status": "ok", "values": row, **where}
    (tmp_path / "cells.jsonl").write_text(json.dumps(line) + "\n")
    (path,) = published.publish(tmp_path / "cells.jsonl", tmp_path)
    assert path.name == "gpu-restore.json"
    table = json.loads(path.read_text())["tables"]["rows"]
    assert table["rows"] == [
        ["llama-2-7b", "adjacent", "1024", "host", "kv", "10.00", "0.90", "kv:32"]
    ]
    assert len(table["columns"]) == len(table["rows"][0])


def test_calls_of_nine_minutes_do_what_they_are_for() -> None:
    """The third step did not fit into the first call, and a chat without its rivals ran instead."""
    minutes = {step.name: step.minutes for step in STEPS}
    first = [step.name for step in STEPS[: sum(map(len, CALLS))]]
    assert first == [name for call in CALLS for name in call]
    begin_s = 15.0
    for call in CALLS:
        needed = 60 * sum(minutes[name] for name in call) + runner.RESERVE_S + begin_s
        assert needed <= 60 * CALL_MINUTES, call


def test_a_cold_machine_has_time_for_two_engines_in_the_first_comparison() -> None:
    """Two engines, kernels compiled at run time and graphs: four minutes were its limit."""
    drift = next(step for step in STEPS if step.name == "drift")
    assert drift.limit_s(rehearse=False) >= 420
