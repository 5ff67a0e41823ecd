import json
import os
import subprocess
import sys

import pytest

from benchmark import ROOT
from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.meeting import best_split, from_below
from sglang_hc.tools.cli.main import main
from sglang_hc.tools.datasheet import datasheet_costs, known_gpus, load_hardware
from support.papers import DEEPSEEK_V32, LLAMA2_7B, LLAMA31_8B, SHAPE
from support.waiting import HANGS_S


@pytest.fixture
def model(tmp_path):
    def write(config: object = LLAMA2_7B) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


@pytest.fixture
def plan(capsys):
    def call(*words: str) -> dict:
        assert main(["plan", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def test_json_has_the_plan_and_times_in_seconds(model, plan):
    out = plan("--model", model(), "--gpu", "A100-40G", "--link-gbps", "26",
               "--disk-gbps", "6.9", "--context", "1024")  # fmt: skip
    assert out["layer_plan"] == {"recompute": 0, "hidden": 31, "kv": 1}
    assert out["tiers"]["host"]["layer_plan"] == out["layer_plan"]
    disk = out["tiers"]["disk"]
    assert 0 < disk["computed_while_read_tokens"] < 1024 and not out["computed_while_read_tokens"]
    read = 1024 - disk["computed_while_read_tokens"]
    assert disk["copy_busy_seconds"] == pytest.approx(
        read * disk["bytes_per_token"]["plan"] / 6.9e9
    )
    assert disk["copy_busy_seconds"] == pytest.approx(disk["compute_busy_seconds"], rel=0.3)
    # 1024 tokens of KV in 32 layers at 26 GB/s.
    assert out["restore_seconds"]["kv"] == pytest.approx(1024 * 32 * 16384 / 26e9)
    assert out["bytes_per_token"] == {
        "plan": 31 * 8192 + 16384, "recompute": 0, "kv": 32 * 16384, "hidden": 32 * 8192,
    }  # fmt: skip
    # 4 D^2 FLOPs a token against 2 D bytes.
    assert out["hidden_balance_gbps"] == pytest.approx(8192 * 312e12 * 0.65 / (4 * 4096**2) / 1e9)
    assert disk["compute_busy_seconds"] <= disk["ttft_seconds"]["plan"]
    for tier in out["tiers"].values():
        for kind in ("restore_seconds", "ttft_seconds"):
            times = tier[kind]
            assert times["plan"] == min(times.values())
        assert tier["restore_seconds"]["plan"] <= tier["ttft_seconds"]["plan"]


def test_what_the_planner_recomputes_beside_a_layer_plan_is_said(model, plan, capsys):
    """K and V of a short history are half as fast as the link brings them: some layers of them are
    recomputed, although stored. From disk the times say so by themselves."""
    words = ("--model", model(), "--gpu", "A100-40G", "--link-gbps", "26", "--disk-gbps", "6.9",
             "--context", "1024")  # fmt: skip
    out = plan(*words)
    kv, best = out["planner"]["kv"], out["planner"]["plan"]
    assert kv["more_recomputed"] > 0 and kv["ttft_seconds"] < out["ttft_seconds"]["kv"]
    assert best == {"more_recomputed": 0, "ttft_seconds": out["ttft_seconds"]["plan"]}
    assert out["tiers"]["disk"]["planner"] == {}
    assert main(["plan", *words]) == 0
    said = f"KV only: for this request the planner recomputes {kv['more_recomputed']} layers more"
    text = capsys.readouterr().out
    assert said in text and text.count("the planner recomputes") == 1


@pytest.mark.parametrize(("gbps", "head"), [(6.9, True), (100.0, False)])
def test_from_disk_the_plan_is_what_a_server_does(model, plan, gbps, head):
    """Its meeting point."""
    out = plan("--model", model(), "--gpu", "H200", "--disk-gbps", str(gbps), "--context", "4096")
    disk, hardware = out["tiers"]["disk"], load_hardware("H200")
    cost = datasheet_costs(hardware, SHAPE, hardware.link_gbps.value * 1e9, gbps * 1e9)
    counts = disk["layer_plan"]
    chosen = LayerPlan(counts["recompute"], counts["hidden"], counts["kv"])
    history = from_below(SourceTier.DISK, 4096, out["new_tokens"])
    split = best_split(cost, chosen, history)
    assert disk["ttft_seconds"]["plan"] == split.seconds
    assert disk["computed_while_read_tokens"] == split.head and (split.head > 0) == head


def test_the_planners_page_shows_what_the_command_prints(model, capsys):
    page = (ROOT / "docs" / "planner.md").read_text()
    command, _, rest = page.partition("    sglang-hc plan ")[2].partition("\n")
    words = command.replace("FOLDER_OR_CONFIG", f"{model()}/config.json").split()
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out.splitlines()
    assert max(map(len, out)) <= 100
    printed = iter(out)
    shown = [line[4:] for line in rest.partition("\nA `config.json`")[0].splitlines() if line]
    assert len(shown) >= 5
    assert all(line in printed for line in shown), "in this order"


def test_mistral_with_its_window_takes_the_times_of_attentionstore_figure_25(model, plan, tmp_path):
    """28K tokens on an A100 at 185 TFLOP/s: the paper's first tokens take 2.5 and 0.12 s."""
    gpu = json.loads(known_gpus()["A100-40G"]) | {"name": "AttentionStore's"}
    gpu["fp16_tflops"] = {"value": 185, "origin": "measured"}
    gpu["flop_fraction"] = {"value": 1, "origin": "measured"}
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(gpu))
    mistral = LLAMA31_8B | dict(model_type="mistral", sliding_window=4096)
    words = ("--gpu", str(path), "--link-gbps", "26", "--context", "28672")
    seconds = plan("--model", model(mistral), *words)["restore_seconds"]
    assert 2.2 <= seconds["recompute"] <= 2.8 and 0.10 <= seconds["kv"] <= 0.16
    without = plan("--model", model(mistral | dict(sliding_window=None)), *words)
    assert without["restore_seconds"]["recompute"] > 3
    assert without["restore_seconds"]["kv"] == seconds["kv"]


def test_from_a_disk_that_is_too_slow_nothing_is_read(model, capsys):
    assert main(["plan", "--model", model(), "--gpu", "H200", "--disk-gbps", "0.1"]) == 0
    from_disk = capsys.readouterr().out.partition("from disk: recompute:32")[2]
    assert "bottleneck: compute (copy works 0.0 us" in from_disk and "read" not in from_disk


@pytest.mark.parametrize("gbps", ["6.9", "500"])
def test_a_disk_straight_to_the_gpu_is_a_link_of_its_rate(model, plan, gbps):
    """Not above the link's own; nothing is computed while it reads."""
    words = ("--model", model(), "--gpu", "A100-40G", "--context", "1024")
    out = plan(*words, "--disk-gbps", gbps, "--direct")
    link = str(min(32.0, float(gbps)))
    assert out["tiers"]["disk"] == plan(*words, "--link-gbps", link)["tiers"]["host"]
    assert out["tiers"]["host"] == plan(*words)["tiers"]["host"]
    assert (out["direct"], out["tiers"]["disk"]["computed_while_read_tokens"]) == (True, 0)


def test_without_new_tokens_the_first_token_is_the_restoration(model, plan):
    out = plan("--model", model(), "--gpu", "A30", "--new-tokens", "0", "--disk-gbps", "6.9")
    for tier in out["tiers"].values():
        assert tier["ttft_seconds"] == tier["restore_seconds"]


@pytest.mark.parametrize(
    "words", [["--link-gbps", "1e-6"], ["--disk-gbps", "10000"], ["--context", "100000000"]]
)
def test_the_largest_and_the_smallest_numbers_are_planned(model, plan, words):
    out = plan("--model", model(), "--gpu", "H200", *words)
    assert 0 < out["ttft_seconds"]["plan"] <= out["ttft_seconds"]["recompute"]


def test_only_the_link_is_asked_when_there_is_no_disk(model, plan):
    out = plan("--model", model(), "--gpu", "H800")
    assert list(out["tiers"]) == ["host"]
    assert (out["link_gbps"], out["disk_gbps"]) == (64, None)


@pytest.mark.parametrize(
    ("config", "link", "expected"),
    [
        (LLAMA2_7B, "26", ("balanced", {"recompute": 0, "hidden": 31, "kv": 1})),
        (LLAMA2_7B, "0.0001", ("compute", {"recompute": 32, "hidden": 0, "kv": 0})),
        (LLAMA31_8B, "1000", ("copy", {"recompute": 0, "hidden": 0, "kv": 32})),
    ],
)
def test_bottleneck(model, plan, config, link, expected):
    out = plan("--model", model(config), "--gpu", "A100-40G", "--link-gbps", link)
    assert (out["bottleneck"], out["layer_plan"]) == expected


def test_sparse_attention_is_planned_as_a_server_serves_it(model, plan, capsys):
    """As KV, its index included, whatever the link: neither hidden nor recomputed layers."""
    config = model(DEEPSEEK_V32)
    for link in ("0.001", "50"):
        out = plan("--model", config, "--gpu", "H200", "--link-gbps", link)
        assert out["layer_plan"] == {"recompute": 0, "hidden": 0, "kv": 61}
        assert out["bytes_per_token"]["kv"] == 61 * (1152 + 128 + 4)
    assert main(["plan", "--model", config, "--gpu", "H200"]) == 0
    assert "61 layers, DSA" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("LlamaForCausalLM", {"recompute": 0, "hidden": 32, "kv": 0}),
        ("Phi3ForCausalLM", {"recompute": 0, "hidden": 0, "kv": 32}),
        ("Qwen3VLForConditionalGeneration", {"recompute": 0, "hidden": 0, "kv": 32}),
    ],
)
def test_only_forms_that_a_server_has_are_planned(model, plan, capsys, name, planned):
    """Of a model of this shape hidden states are half of K and V."""
    config = model({**LLAMA2_7B, "architectures": [name]})
    out = plan("--model", config, "--gpu", "H100", "--context", "8192")
    assert out["layer_plan"] == planned
    assert main(["plan", "--model", config, "--gpu", "H100"]) == 0
    assert (f"KV only: {name} is none" in capsys.readouterr().out) == (planned["kv"] > 0)


def test_what_a_server_refuses_is_not_planned(model, capsys):
    config = model({**LLAMA2_7B, "architectures": ["DeepseekV4ForCausalLM"]})
    assert main(["plan", "--model", config, "--gpu", "H100"]) == 2
    assert "DeepseekV4ForCausalLM is refused by a server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "B300"], "--gpu: unknown GPU 'B300': give one of 4090, A100-40G"),
        (["--link-gbps", "fast"], "--link-gbps 'fast': give a number from 1e-06 to 10000"),
        (["--link-gbps", "nan"], "--link-gbps 'nan': give a number"),
        (["--link-gbps", "10001"], "--link-gbps '10001': give a number"),
        (["--disk-gbps", "9e-7"], "--disk-gbps '9e-7': give a number"),
        (["--context", "100000001"], "--context '100000001': give a whole number"),
        (["--link-gbps", "26e9"], "--link-gbps '26e9': give a number"),
        (["--disk-gbps", "0"], "--disk-gbps '0': give a number"),
        (["--disk-gbps=-3"], "--disk-gbps '-3': give a number"),
        (["--direct"], "--direct: give the rate of the disks as --disk-gbps"),
        (["--context", "0"], "--context '0': give a whole number from 1 to 100000000"),
        (["--context", "1.5"], "--context '1.5': give a whole number"),
        (["--new-tokens", "many"], "--new-tokens 'many': give a whole number"),
        (["--model", "/nowhere"], "--model: /nowhere does not exist"),
    ],
)
def test_one_clear_error_per_mistake(model, capsys, words, message):
    assert main(["plan", "--model", model(), "--gpu", "A30", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA2_7B, "hidden_size": None}, "field hidden_size (or n_embd, d_model) is missing"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_config_errors_name_the_file_and_the_field(model, capsys, config, message):
    folder = model(config)
    assert main(["plan", "--model", folder, "--gpu", "A30"]) == 2
    err = capsys.readouterr().err
    assert f"--model: {folder}/config.json" in err
    assert message in err


def test_a_config_that_is_not_json(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text("{")
    assert main(["plan", "--model", str(path), "--gpu", "A30"]) == 2
    assert "not valid JSON" in capsys.readouterr().err


def test_no_torch_is_loaded(model):
    code = (
        "import sys; from sglang_hc.tools.cli import capacity, main, simulate; "
        f"status = main.main(['plan', '--model', {model()!r}, '--gpu', 'A30']); "
        "sys.exit(status or 'torch' in sys.modules or 'sglang' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, timeout=HANGS_S, env=env)
    assert done.returncode == 0, done.stderr
