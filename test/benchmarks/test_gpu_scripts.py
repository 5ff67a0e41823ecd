"""The scripts of benchmark/gpu, as far as they run without a GPU: against fake servers."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmark import ROOT
from benchmark.gpu import settings
from benchmark.gpu.tables import served_results
from benchmark.harness import arms, report
from benchmark.harness.cells import latest, read

pytestmark = pytest.mark.long

SHORT = ["--sessions", "2", "--turns", "2", "--system-len", "8", "--input-len", "6"]
SHORT += ["--output-len", "3", "--think", "0", "--rates", "inf", "--repeat", "1", "--warmup", "0"]

Script = Callable[..., int]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Runs one script with its words; arms start the fake instead of a real launcher."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(arms, "HC_MODULE", "support.fake_sglang")
    monkeypatch.setattr(arms, "SGLANG_MODULE", "support.fake_sglang")

    def run(name: str, *words: str, gpu: bool) -> int:
        monkeypatch.setattr(arms.machine, "has_gpu", lambda: gpu)
        monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmark" / "gpu" / f"{name}.py"), *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"benchmark.gpu.{name}", run_name="__main__")
        return int(ended.value.code or 0)

    return run


def result_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return loaded


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"),
    [("llama-2-7b", 6.738, 512), ("llama-2-13b", 13.016, 800), ("llama-3.1-8b", 8.030, 128)],
)
def test_shapes_have_the_size_of_the_public_models(
    tmp_path: Path, name: str, billions: float, kv_kib: int
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = settings.make_shape(name, tmp_path)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=0.001)
    elements = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert 2 * 2 * elements == kv_kib * 1024
    assert AutoTokenizer.from_pretrained(folder)("a word").input_ids
    assert not list(folder.glob("*.safetensors"))


def test_multi_turn_bounds_the_pool_and_says_which_goals_were_met(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--shape", "llama-2-7b", "--models", str(tmp_path), "--server-args", "--mine 1"]
    assert script("multi_turn", *words, "--output", str(tmp_path), *SHORT, gpu=True) == 0
    result = result_of(tmp_path)
    commands = {arm["name"]: arm["command"] for arm in result["arms"]}
    assert list(commands) == ["stock", "hicache", "auto"]
    for name, command in commands.items():
        assert "--load-format dummy --dtype bfloat16 --mine 1" in command
        assert "--max-total-tokens 65536" in command
        assert ("--page-size 64" in command) is (name == "hicache")
    assert result["command"].startswith("python -m benchmark.gpu.multi_turn --shape llama-2-7b")
    goals = capsys.readouterr().out.partition("\nGoals\n")[2].splitlines()
    assert len(goals) == 3 and all(line.startswith(("met: ", "MISSED: ")) for line in goals)
    assert "goal 2.2" in goals[0] and "goal 0.99" in goals[1] and "goal 1.27" in goals[2]


def test_a_rehearsal_runs_two_layers_without_hicache(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--shape", "llama-3.1-8b", "--models", str(tmp_path), "--rehearse"]
    assert script("overhead", *words, "--output", str(tmp_path), gpu=False) == 0
    result = result_of(tmp_path)
    assert [arm["name"] for arm in result["arms"]] == ["stock", "auto"]
    assert all('"num_hidden_layers": 2' in arm["command"] for arm in result["arms"])
    assert all('"num_key_value_heads": 2' in arm["command"] for arm in result["arms"])
    assert "hicache: left out" in result["skipped"][0]
    assert "this was a rehearsal" in capsys.readouterr().out


def test_cells_of_single_arms_become_one_result_and_are_not_measured_again(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the campaign does: every arm in a process of its own, all of them in one file."""
    cells = tmp_path / "cells.jsonl"
    words = ["--shape", "llama-2-7b", "--models", str(tmp_path), *SHORT, "--cells", str(cells)]
    for arm in ("auto", "hicache", "stock"):
        assert script("multi_turn", *words, "--arms", arm, gpu=True) == 0
    lines = read(cells)
    assert [line["key"] for line in lines] == [
        f"multi-turn/llama-2-7b-shape/{arm}/rate=inf/repeat 0"
        for arm in ("auto", "hicache", "stock")
    ]
    assert "--page-size 64" in lines[1]["values"]["arm"]["command"]
    assert "--cells" not in lines[0]["command"]
    result = served_results(latest(lines))["multi-turn-llama-2-7b"]
    assert [arm["name"] for arm in result["arms"]] == ["stock", "hicache", "auto"]
    assert result["reference"] == "stock"
    pairs = {(row["arm"], row["against"]) for row in result["ratios"]}
    assert pairs == {("hicache", "stock"), ("auto", "stock"), ("auto", "hicache")}
    assert [row[1] for row in report.overview_table(result).rows] == ["stock", "hicache", "auto"]
    assert len(settings.goal_lines(result, "llama-2-7b")) == 3
    capsys.readouterr()
    assert script("multi_turn", *words, "--arms", "hicache", gpu=True) == 0
    assert "nothing left to run" in capsys.readouterr().out and len(read(cells)) == 3
    # A second repeat runs that one only.
    again = ["--arms", "stock", "--repeat", "2"]
    assert script("multi_turn", *words, *again, gpu=True) == 0
    assert [line["key"][-8:] for line in read(cells)[3:]] == ["repeat 1"]


@pytest.mark.usefixtures("models")
def test_smoke_compares_with_a_server_that_forgets_nothing(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--models", "llama-mha", "--page-size", "16", "--output", str(tmp_path)]
    assert script("smoke", *words, gpu=True) == 0
    result = result_of(tmp_path / "llama-mha")
    commands = {arm["name"]: arm["command"] for arm in result["arms"]}
    assert list(commands) == ["stock", "hicache", "kv", "hidden", "auto"]
    assert commands["stock"].endswith("--max-total-tokens 16384")
    assert all("--page-size 16" in command for command in commands.values())
    assert {item["verdict"] for item in result["agreement"]} == {"equal"}
    assert "every arm restored" in capsys.readouterr().out


@pytest.mark.usefixtures("models")
def test_smoke_fails_when_nothing_came_back_from_the_host(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--models", "llama-mha", "--arms", "stock,kv", "--output", str(tmp_path)]
    assert script("smoke", *words, "--server-args=--fake-no-host-tier", gpu=True) == 1
    assert "llama-mha: kv brought nothing back from the host tier" in capsys.readouterr().out


def test_goals() -> None:
    def row(arm: str, against: str, metric: str, group: str, median: float) -> dict[str, Any]:
        return {
            **{"arm": arm, "against": against, "metric": metric, "group": group, "point": "p"},
            **{"median": median, "low": median, "high": median},
        }

    rows = [
        row("auto", "stock", "median_ttft", "turns 1+", 2.3),
        row("auto", "hicache-direct", "median_ttft", "turns 1+", 1.2),
        row("auto", "stock", "median_ttft", "turn 0", 0.5),
        row("auto", "stock", "median_tbt", "all", 0.98),
        row("auto", "stock", "output_token_throughput", "all", 0.995),
        row("hicache", "stock", "median_ttft", "turns 1+", 9.0),
    ]
    lines = settings.goal_lines({"experiment": "multi-turn", "ratios": rows}, "llama-2-7b")
    assert [line.partition(":")[0] for line in lines] == ["met", "MISSED", "MISSED"]
    lines = settings.goal_lines({"experiment": "multi-turn", "ratios": rows}, "llama-3.1-8b")
    assert [line.partition(":")[0] for line in lines] == ["met", "met", "MISSED"]
    lines = settings.goal_lines({"experiment": "overhead", "ratios": rows[3:5]}, "llama-2-7b")
    assert [line.partition(":")[0] for line in lines] == ["MISSED", "met"]
