"""`sglang-hc plan --throughput`."""

import json
import re

import pytest

from benchmark import ROOT
from benchmark.throughput.paper import opt_config
from sglang_hc.policy.throughput import Processor, Requests, Ways
from sglang_hc.tools.cli.main import main
from sglang_hc.tools.datasheet import Rates, Stored, load_hardware, streamed_model
from sglang_hc.tools.model_shape import ModelShape
from support.papers import LLAMA2_7B

DEEPSEEK_V2_LITE = dict(
    model_type="deepseek_v2", hidden_size=2048, num_hidden_layers=27, num_attention_heads=16,
    num_key_value_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
    v_head_dim=128, intermediate_size=10944, vocab_size=102400, torch_dtype="bfloat16",
)  # fmt: skip
MACHINE = ("--gpu", "4090", "--link-gbps", "25", "--host-gb", "128")


@pytest.fixture
def plan(tmp_path, capsys):
    def call(*words: str, config: object = None) -> tuple[int, str, str]:
        """(status, output, errors) of the command for a model, OPT-30B unless told."""
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config or opt_config("30B")))
        status = main(["plan", "--throughput", "--model", str(path), *words])
        return status, *capsys.readouterr()

    return call


def test_json_says_what_the_model_of_a_pass_says(plan):
    status, text, _ = plan(*MACHINE, "--context", "512", "--output", "64", "--json")
    out, gpu = json.loads(text), load_hardware("4090")
    shape = ModelShape.from_config(opt_config("30B"))
    rates = Rates(gpu.flops, gpu.memory_bandwidth, 25e9, None)
    model = streamed_model(rates, shape, 128e9, 24e9, Stored())
    ways = Ways(model, Requests(512, 64), Processor(75e9, 2 * shape.layer_params / 1.5e12))
    assert status == 0 and tuple(out["ways"]) == ways.names
    for name, found in out["ways"].items():
        served = ways.best(name)
        assert (found["batch"], found["rounds"]) == (served.load.requests, served.rounds)
        assert found["resident_layers"] == served.split.resident
        assert tuple(found["tokens"].values()) == served.split[:4]
        assert found["tokens_per_second"] == served.tokens_per_second
        assert found["bound"] == served.times.bound
        assert found["host_gb"] <= 128 and found["device_gb"] <= 24 * 0.9
    assert out["cpu"]["tokens_per_second"] == pytest.approx(
        out["cpu"]["batch"] / ways.cpu_seconds(out["cpu"]["batch"])
    )
    assumed = {"flop_fraction": 0.65, "device_reserved": 0.1, "cpu_gbps": 75, "cpu_tflops": 1.5}
    assert out["assumed"] == assumed
    assert out["fastest"] == "hybrid" and 1 < out["cpu_faster_below"] < 500


def test_text_has_every_way_and_says_that_it_is_modelled(plan):
    _, text, _ = plan(*MACHINE)
    for name in ("SGLang's own", "weights ahead", "KV", "ACT", "hybrid", "CPU computes the rest"):
        assert f"\n{name} " in text
    assert "fastest without the CPU: hybrid\n" in text
    cpu = "a CPU that computes the rest (75 GB/s, 1.5 TFLOP/s: assumed)"
    assert f"\n{cpu} generates more\n" in text
    few = plan(*MACHINE, "--link-gbps", "50")[1]
    assert re.search(rf"\nbelow \d+ requests {re.escape(cpu)} is faster\n", few)
    assert text.endswith("modelled: nothing here was measured\n")
    assert max(map(len, text.splitlines())) <= 100


def test_the_planners_page_shows_what_the_command_prints(plan):
    """Its excerpt is for OPT-30B."""
    page = (ROOT / "docs" / "planner.md").read_text()
    command, _, rest = page.partition("    sglang-hc plan --throughput ")[2].partition("\n")
    words = command.replace("--model FOLDER_OR_CONFIG ", "").split()
    printed = iter(plan(*words)[1].splitlines())
    shown = [line[4:] for line in rest.partition("\nFor OPT-30B")[0].splitlines() if line]
    assert len(shown) >= 8
    assert all(line in printed for line in shown), "in this order"


def test_where_everything_fits_nothing_crosses(plan):
    config = LLAMA2_7B | {"vocab_size": 32000}
    _, text, _ = plan("--gpu", "H200", "--host-gb", "512", "--output", "1000", config=config)
    assert "fastest without the CPU: SGLang's own; nothing crosses" in text
    assert "is faster" not in text


def test_smaller_bytes_and_less_memory_change_the_plan(plan):
    def rate(*words: str) -> float:
        out = json.loads(plan(*MACHINE, *words, "--json")[1])
        return out["ways"]["kv"]["tokens_per_second"]

    assert rate("--kv-bytes", "1") > 1.5 * rate()
    assert rate("--weight-bytes", "1") > rate() > rate("--device-gb", "12")
    assert rate("--weight-bytes", "0.53") > rate("--weight-bytes", "1")


def test_latent_attention_has_no_hidden_states(plan):
    status, text, _ = plan(*MACHINE, config=DEEPSEEK_V2_LITE)
    assert status == 0 and "\nKV " in text and "\nACT" not in text and "\nhybrid" not in text


def test_what_does_not_fit_is_said(plan):
    status, text, _ = plan(*MACHINE, "--device-gb", "8", "--context", "8000")
    assert status == 0 and "SGLang's own            does not fit\n" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "4090"], "--throughput: give the host memory for weights and state as --host-"),
        ([*MACHINE, "--host-gb", "much"], "--host-gb 'much': give a number from 0.1 to 1e+06"),
        ([*MACHINE, "--host-gb", "0"], "--host-gb '0': give a number from 0.1"),
        ([*MACHINE, "--device-gb", "25"], "--device-gb '25': give a number from 0.1 to 24"),
        ([*MACHINE, "--device-gb", "nan"], "--device-gb 'nan': give a number from 0.1 to 24"),
        ([*MACHINE, "--weight-bytes", "3"], "--weight-bytes '3': give one of 2 (16 bits), 1 (8 "
         "bits), 0.53 (4 bits with their scales)"),
        ([*MACHINE, "--kv-bytes", "0.5"], "--kv-bytes '0.5': give one of 2 (16 bits), 1 (8 bits)"),
        ([*MACHINE, "--context", "0"], "--context '0': give a whole number from 1 to 10000000"),
        ([*MACHINE, "--context", ""], "--context '': give a whole number"),
        ([*MACHINE, "--context", "9" * 5000], "give a whole number from 1 to 10000000"),
        ([*MACHINE, "--output", "-1"], "--output '-1': give a whole number"),
        ([*MACHINE, "--link-gbps", "0"], "--link-gbps '0': give a number from 1e-06"),
        ([*MACHINE, "--disk-gbps", "7"], "--disk-gbps: --throughput does not use it; leave it out"),
        ([*MACHINE, "--new-tokens", "7"], "--new-tokens: --throughput does not use it"),
        ([*MACHINE, "--direct"], "--direct: --throughput does not use it"),
        ([*MACHINE, "--gpu", "B300"], "--gpu: unknown GPU 'B300': give one of 4090"),
        ([*MACHINE, "--host-gb", "50", "--device-gb", "4"], "--host-gb 50, --device-gb 4: not one "
         "request fits; the layers have 59.2 GB, one request 1.5, and two layers on the device 2.5 "
         "of the 2.9 that are left for them; give more"),
    ],
)  # fmt: skip
def test_one_clear_error_per_mistake(plan, words, message):
    status, text, errors = plan(*words)
    assert (status, text) == (2, "") and len(errors.splitlines()) == 1
    assert message in errors


@pytest.mark.parametrize(
    "option", ["--host-gb", "--device-gb", "--weight-bytes", "--kv-bytes", "--output"]
)
def test_its_options_mean_nothing_without_it(tmp_path, capsys, option):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(opt_config("30B")))
    assert main(["plan", "--model", str(path), "--gpu", "4090", option, "1"]) == 2
    said = capsys.readouterr().err
    assert f"{option}: only --throughput uses it; add that, or leave this out" in said


def test_a_config_without_words_is_refused(plan):
    status, _, errors = plan(*MACHINE, config=LLAMA2_7B)
    assert status == 2 and "--model: field vocab_size is missing" in errors
