"""`sglang-hc simulate` and `capacity` as a user meets them."""

import dataclasses
import json
import re

import pytest

from sglang_hc.forms import StateShape
from sglang_hc.policy.cost_model import SourceTier, TierCopy
from sglang_hc.policy.fit import Fit, StepFit
from sglang_hc.profile_file import encode
from sglang_hc.tools.cli.main import main
from support.profiles import cost_model

SMALL = ["--workload", "attentionstore", "--sessions", "12", "--model", "llama-13b"]
SIZES = ["--dram-gb", "10", "--disk-gb", "20"]
NOTHING = ["--dram-gb", "0", "--disk-gb", "0"]


@pytest.mark.parametrize("policy", ["queue", "lru", "fifo", "belady"])
def test_simulate_prints_the_promised_numbers(capsys, policy):
    assert main(["simulate", *SMALL, *SIZES, "--policy", policy, "--json", "--seed", "3"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert 0 < data["hit_rate"] < 1
    assert 0 < data["turn_hit_rate"] < 1
    assert 0 <= data["dram_share_of_hits"] <= 1
    assert data["turns"] > 12 and data["seconds"] > 0
    assert data["policy"] == policy


def test_simulate_reads_any_config_and_plan(capsys, tmp_path):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    bytes_of = {}
    for forms in ("kv", "hidden"):
        words = ["simulate", *SMALL[:-1], str(tmp_path), *SIZES, "--forms", forms, "--json"]
        assert main(words) == 0
        bytes_of[forms] = json.loads(capsys.readouterr().out)["token_bytes"]
    assert bytes_of["kv"] == 2 * bytes_of["hidden"]


def written(capsys, rule, share):
    load = ["simulate", "--workload", "attentionstore", "--sessions", "120", "--model", "llama-13b"]
    tiers = ["--dram-gb", "15", "--disk-gb", "4000", "--multi-turn-share", share, "--write", rule]
    assert main([*load, *tiers, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    return data["disk_written_gb"], data["hit_rate"]


def test_what_nobody_uses_again_is_not_written(capsys):
    everything, _ = written(capsys, "all", "0.01")
    assert 0 < written(capsys, "second-use", "0.01")[0] <= 0.02 * everything


def test_chats_hit_what_they_hit_with_everything_written(capsys):
    everything, hits = written(capsys, "all", "0.73")
    some, found = written(capsys, "second-use", "0.73")
    assert some < everything and hits > 0.2 and found >= hits - 0.02


def test_simulate_describes_and_plots(capsys, tmp_path):
    plot = tmp_path / "hits.png"
    assert main(["simulate", *SMALL, *SIZES, "--plot", str(plot), "--schedule", "ready-first"]) == 0
    out = capsys.readouterr().out
    assert "token hit rate" in out and "hits from DRAM" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*SMALL, "--dram-gb", "x", "--disk-gb", "1"], "--dram-gb 'x': give a number"),
        ([*SMALL, "--dram-gb", "1", "--disk-gb", "-1"], "--disk-gb '-1': give a number"),
        ([*SMALL, "--dram-gb", "0", "--disk-gb", "0"], "no tier holds one block of 52.4 MB"),
        ([*SMALL, "--dram-gb", "0", "--disk-gb", "9"], "--dram-gb: the disk tier works through"),
        ([*SMALL[:4], "--model", "gpt-9", *SIZES], "unknown model 'gpt-9': give one of llama-13b"),
        (["--workload", "nothing", *SMALL[4:], *SIZES], "neither attentionstore, sharegpt4"),
        ([*SMALL, *SIZES, "--forms", "kv:3"], "covers 3 layers but the model has 40"),
        ([*SMALL, *SIZES, "--forms", "recompute:40"], "stores nothing"),
        ([*SMALL, *SIZES, "--sessions", "0"], "--sessions '0': give a whole number"),
        ([*SMALL, *SIZES, "--alpha", "1"], "--alpha: only l-eval"),
        ([*SMALL, *SIZES, "--policy", "none"], "--policy none keeps nothing: give --dram-gb 0"),
        ([*SMALL, *SIZES, "--gpu", "A1"], "--gpu: unknown GPU 'A1': give one of"),
        ([*SMALL, *SIZES, "--gpu", "L20", "--gpu-tflops", "9"], "--gpu-tflops: --gpu has its own"),
        ([*SMALL, *SIZES, "--kv-tokens", "9"], "--kv-tokens '9': give a whole number from 128"),
        ([*SMALL, *SIZES, "--kv-tokens", "9999", "--hbm-gb", "1"], "--hbm-gb: --kv-tokens holds"),
        ([*SMALL, *SIZES, "--multi-turn-share", "2"], "--multi-turn-share '2': give a number"),
        (["--workload", "l-eval", *SMALL[2:], *SIZES, "--tokens-per-turn", "9"], "only attention"),
        ([*SMALL, *SIZES, "--write", "some"], "--write: must be all, second-use, or bytes a day"),
        ([*SMALL, *SIZES, "--plot", "/nowhere/x.png"], "--plot /nowhere/x.png: cannot be"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(capsys, words, says):
    assert main(["simulate", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error and "\n" not in error


def test_a_broken_trace_is_named_with_its_line(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1}\n')
    assert main(["simulate", "--workload", str(path), *SMALL[4:], *SIZES]) == 2
    assert f"--workload: {path}:1: Object missing required field" in capsys.readouterr().err


def test_capacity_finds_sizes_that_reach_the_target(capsys, tmp_path):
    plot = tmp_path / "curve.png"
    load = [*SMALL, "--rate", "2", "--batch", "2"]
    words = [*load, "--target", "0.9", "--dram-target", "0.9"]
    assert main(["capacity", *words, "--json", "--plot", str(plot)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["hit_rate"] >= 0.9 and answer["dram_share_of_hits"] >= 0.9
    assert plot.read_bytes().startswith(b"\x89PNG")
    sizes = [point["gb"] for point in answer["curve"]]
    assert sizes == sorted(sizes) and len(sizes) >= 3
    again = ["--dram-gb", str(answer["dram_gb"]), "--disk-gb", str(answer["disk_gb"])]
    assert main(["simulate", *load, *again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reusable_hit_rate"] == answer["hit_rate"]


def test_capacity_says_it_in_words(capsys):
    assert main(["capacity", *SMALL]) == 0
    assert "of the reusable tokens need" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["0", "1.2", "most"])
def test_capacity_refuses_a_target_that_is_no_share(capsys, target):
    assert main(["capacity", *SMALL, "--target", target]) == 2
    assert "--target" in capsys.readouterr().err


def test_a_server_without_tiers_is_simulated(capsys):
    assert main(["simulate", *SMALL, "--policy", "none", *NOTHING, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["hit_rate"] == data["restored_share"] == 0
    spent = data["prefill_seconds"] + data["decode_seconds"] + data["idle_seconds"]
    assert spent == pytest.approx(data["simulated_seconds"], rel=1e-3)
    assert data["output_tokens_per_second"] > 0
    for name in ("queue_wait", "service_ttft", "ttft"):
        p50, p90, p99 = (data[f"{name}_{which}"] for which in ("p50", "p90", "p99"))
        assert p50 <= p90 <= p99 and p50 / 50 <= data[f"{name}_mean"] <= p99


def profile(folder, **changes):
    """A profile of llama-13b, whose disk takes 1 us for a token of a layer."""
    cost = dataclasses.replace(
        cost_model(host=1e-7, disk=1e-6, project=1e-9, prefill=1e-5),
        step=StepFit(Fit(1e-4, 1e-5), 1e-9),
        passes=Fit(1e-4, 1e-5),
        shape=StateShape(40, 5120 * 4, (5120 * 4, 5120 * 4), "torch.float32"),
    )
    path = folder / "profile.json"
    path.write_text(encode(dataclasses.replace(cost, **changes)))
    return str(path)


def test_a_profile_is_a_machine_and_its_elements_count(capsys, tmp_path):
    words = [*SMALL, *SIZES, "--gpus", "1", "--profile", profile(tmp_path), "--forms", "auto"]
    assert main(["simulate", *words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["layer_plan"] == "hidden:40", "half the bytes at the same price a byte"
    assert data["token_bytes"] == 40 * 5120 * 4
    assert 0 < data["restored_share"] <= data["hit_rate"]


@pytest.mark.parametrize(
    ("changes", "words", "says"),
    [
        (
            {"step": None},
            [],
            "--profile: .*: measured without passes of an engine; write a new one",
        ),
        (
            {"shape": StateShape(32, 8192, (8192,), "float16")},
            [],
            "32 layers of 4096, and this one",
        ),
        ({}, ["--gpus", "2"], "measured on one GPU; leave --gpus out"),
        ({}, ["--link-gbps", "20"], "--link-gbps: --profile has all costs; leave one"),
        ({}, ["--profile", "/nowhere"], "--profile: /nowhere: cannot be read"),
        ({}, ["--profile", __file__], "--profile: .*give a file of|--profile: .*JSON"),
        ({"copies": {SourceTier.HOST: TierCopy(Fit(0, 1), Fit(0, 1))}}, [], "no costs for disk"),
    ],
)
def test_a_profile_of_something_else_is_one_sentence(capsys, tmp_path, changes, words, says):
    given = [*SMALL, *SIZES, "--gpus", "1", "--profile", profile(tmp_path, **changes), *words]
    for command in (["simulate", *given], ["capacity", *given[:6], *given[10:]]):
        assert main(command) == 2
        error = capsys.readouterr().err.strip()
        assert re.search(says, error) and "\n" not in error


def test_the_machine_is_that_of_plan(capsys):
    seconds = {}
    for gpu in ("A100-40G", "H100"):
        assert main(["simulate", *SMALL, *SIZES, "--gpu", gpu, "--json"]) == 0
        seconds[gpu] = json.loads(capsys.readouterr().out)["prefill_seconds"]
    assert seconds["H100"] < 0.6 * seconds["A100-40G"]
