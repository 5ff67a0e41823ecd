"""The server measures its machine once, keeps what it measured, and takes a profile instead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmark.harness.in_process import use_one_thread
from sglang_hc.policy.correction import WINDOW, Resource
from sglang_hc.profile_file import read_profile
from sglang_hc.srt.start import calibrate_command, timed_engine
from sglang_hc.tools.cli.main import main
from support.core import MODELS, Core, run_in_child
from support.profiles import cost_model, write

MODEL = MODELS / "llama-mha"
SMALL = ("--max-total-tokens", "640", "--dtype", "float32", "--hc-host-size-gb", "0.05")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sglang-hc"


def start(model: str, *flags: str) -> tuple[str, int]:
    """The layer plan of a fresh server, and how often it measured."""
    from sglang_hc.srt.model import calibrate

    measured = 0
    original = calibrate.measured

    def count(*args, **kwargs):
        nonlocal measured
        measured += 1
        return original(*args, **kwargs)

    calibrate.measured = count
    core = Core(*SMALL, *flags, model=model, profile=None)
    assert len(core.ask(list(range(3, 200)), 2).tokens) == 2
    return core.tree.stats()["layer_plan"], measured


def test_the_first_start_measures_and_the_second_finds_what_it_measured(
    models: None, cache: Path, tmp_path: Path
) -> None:
    disk = ("--hc-disk", f"{tmp_path / 'disk'}:1")
    plan, measured = run_in_child(start, "llama-mha", *disk)
    assert measured == 1
    (file,) = cache.iterdir()
    found = json.loads(file.read_text())
    assert found["origin"] == "measured" and not found["overlap"]
    assert found["fingerprint"].startswith("LlamaForCausalLM ")
    assert set(found["copies"]) == {"host", "disk"}
    for line in (found["project"], found["prefill"], *found["copies"]["host"].values()):
        assert line["fixed"] + line["per_token"] > 0, "on a busy machine either may be 0"
    assert run_in_child(start, "llama-mha", *disk) == (plan, 0)
    for useless in ("damaged", json.dumps(found | {"version": 1})):
        file.write_text(useless)
        assert run_in_child(start, "llama-mha", *disk)[1] == 1
        assert json.loads(file.read_text())["version"] == found["version"]


def learned(factor: float | None) -> dict[str, float]:
    """What a fresh server knows of its costs; then it sees that prefills take `factor` times as
    long as they should, and ends."""
    core = Core(*SMALL, profile=None)
    costs = core.tree.tiers.restorer.planner.costs
    known = {resource.value: found for resource, found in costs.learned.items()}
    for _ in range(WINDOW if factor is not None else 0):
        costs.observe({Resource.PREFILL: 1.0}, factor)
    core.tree.release_host_resources()
    return known


def test_a_server_begins_with_what_the_one_before_has_learned(models: None, cache: Path) -> None:
    assert "prefill" not in run_in_child(learned, 3.0)
    assert run_in_child(learned, None)["prefill"] == pytest.approx(3.0)
    (file,) = cache.iterdir()
    found = json.loads(file.read_text())
    assert sum(found["plan"].values()) == 4, "the layer plan is kept with the costs"


@pytest.mark.parametrize("model", ["deepseek-v2", "llama-gqa"])
def test_a_model_without_hidden_form_or_with_grouped_heads_gets_kv(
    models: None, cache: Path, model: str
) -> None:
    plan, measured = run_in_child(start, model)
    assert (plan.partition(":")[0], measured) == ("kv", 1)


def test_auto_follows_the_given_costs(models: None, cache: Path, tmp_path: Path) -> None:
    """The same model: KV where the source is fast, hidden states where it is slow, or both."""
    found = {}
    costs = {"fast": (1e-8, 2e-5), "between": (3e-6, 2e-5), "slow": (2e-5, 2e-4)}
    for name, (host, prefill) in costs.items():
        folder = tmp_path / name
        folder.mkdir()
        path = write(cost_model(host=host, project=2e-6, prefill=prefill), folder)
        found[name], measured = run_in_child(start, "llama-mha", "--hc-profile", path)
        assert measured == 0
    assert (found["fast"], found["slow"]) == ("kv:4", "hidden:4")
    assert "hidden" in found["between"] and "kv" in found["between"]
    assert not cache.exists()


def command(words: list[str]) -> int:
    """The command as the server of these tests would be started: costs depend on the threads."""
    use_one_thread()
    return main(words)


TIMED = timed_engine.Timed(
    [(1, 70, 4e-3), (8, 560, 8e-3), (1, 1030, 5e-3), (8, 8240, 16e-3)],
    [(16, 0, 0.1), (512, 0, 0.5), (16, 512, 0.15), (256, 512, 0.4)],
)


def as_timed(words: list[str]) -> int:
    """The command, as if an engine had been timed before."""
    calibrate_command.timed_engine = lambda model, flags: TIMED
    return command(words)


@pytest.mark.parametrize("run", [as_timed, pytest.param(command, marks=pytest.mark.slow)])
def test_the_command_writes_a_profile_that_the_server_and_the_simulator_take(
    models: None,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    run: Callable[[list[str]], int],
) -> None:
    output = tmp_path / "profile.json"
    words = ["profile", "--model", str(MODEL), "--output", str(output), "--", "--dtype", "float32"]
    assert run_in_child(run, words) == 0
    assert not cache.exists()
    assert run_in_child(start, "llama-mha", "--hc-profile", str(output))[1] == 0
    cost = read_profile(str(output))
    assert cost.step is not None and 0 < cost.step.seconds(1, 100) < cost.step.seconds(8, 9000)
    load = ["--workload", "sharegpt4", "--sessions", "5", "--model", str(MODEL), "--json"]
    load += ["--policy", "none", "--dram-gb", "0", "--disk-gb", "0", "--profile", str(output)]
    assert main(["simulate", *load]) == 0
    data = json.loads(capsys.readouterr().out)
    layers = 4
    assert data["token_bytes"] == layers * 2 * 4 * 64 * 4
    assert cost.passes is not None and cost.passes.seconds(64) < cost.passes.seconds(512, 512)
    # Several prompts share a pass at times.
    assert data["prefill_seconds"] > layers * cost.passes.floor * data["turns"] / 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "/", "--output", "x"], "--model: / has no config.json; give a folder"),
        (["--output", "/no/such/folder/x"], "--output: the folder /no/such/folder does not exist"),
        (["--output", "x", "--hc-disk", "a:0"], "--hc-disk: .*more than 0 GB"),
    ],
)
def test_wrong_words_are_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in words else ["--model", str(MODEL)]
    assert main(["profile", *model, *words]) == 2
    assert re.search(message, capsys.readouterr().err)
