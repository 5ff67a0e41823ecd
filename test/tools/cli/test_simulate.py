"""`sglang-hc simulate` and `capacity` as a user meets them."""

import json

import pytest

from sglang_hc.tools.cli.main import main

SMALL = ["--workload", "attentionstore", "--sessions", "12", "--model", "llama-13b"]
SIZES = ["--dram-gb", "10", "--disk-gb", "20"]


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
