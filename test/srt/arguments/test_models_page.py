"""docs/models.md says what is refused and what is needed: nothing is missing, nothing left over."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import overrides
from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_spec_by_arch
from sglang.srt.configs.model_config import is_hybrid_swa_model
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sglang_hc.config import FLAGS as FLAGS_OF_OURS
from sglang_hc.config import ConfigError, HcConfig, flag_of
from sglang_hc.srt.arguments import hicache_flags, offload_flags
from sglang_hc.srt.arguments.server_args import (
    SIZES,
    SPECULATION,
    SWITCHES,
    VALUES,
    WITH_STAGES,
    refuse_modes,
)
from sglang_hc.srt.model.model_state import refuse_other_pools

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text()
REFUSED = PAGE.partition("The start refuses")[2].partition("## Versions")[0]
HICACHE = (ROOT / "docs" / "from-hicache.md").read_text()
RECURRENT = PAGE.partition("### Recurrent layers")[2].partition("## ")[0].replace(",", "")
OFFLOADING = REFUSED.partition("- **Weights in host memory** ")[2].partition("\n- ")[0]
STREAMING = REFUSED.partition("- **State of running requests in host memory** ")[2]
STREAMING = STREAMING.partition("\n- ")[0]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"`(--[a-z0-9-]+)", text))


FLAGS = flags_in(REFUSED.replace(OFFLOADING, "").replace(STREAMING, ""))
"""Of the page; those of OFFLOADING, and of STREAMING (test_refused_streaming.py), are in tables of
their own."""
MODELS = {"--is-embedding", "--encoder-only"}
"""Refused in the table of models."""
ELSEWHERE = {
    "--hc-disable", "--hc-exact", "--hc-overflow",  # ours
    "--cuda-graph-backend-prefill", "--enable-lora",
    "--enable-deterministic-inference", "--enable-hierarchical-cache", "--radix-cache-backend",
    "--hicache-", "--disaggregation-mode", "--kv-cache-dtype", "--cpu-offload-gb",
    "--offload-group-size", "--enable-http2", "--tokenizer-worker-num", "--enable-dp-attention",
    "--enable-attn-tp-input-scattered", "--mamba-radix-cache-strategy", "--nnodes", "--tp-size",
    "--pp-size", "--dp-size",
}  # fmt: skip
"""Refused with a value, with another flag or in another place; e2e/test_start.py, test_graphs.py,
test_flags_have_effect.py and test_kv_pool.py have these."""

WITH_VALUES = {"--load-format", "--weight-cache-mode", "--quantization"}
"""Refused beside `--hc-offload-gb` with most or some values."""

OTHERWISE_THERE = {
    "enable_lora",
    "lora_paths",
    "remote_instance_weight_loader_start_seed_via_transfer_engine",
}
"""On the page they are adapters and servers that others load from."""

NAMED_OTHERWISE = {"attn_cp_size", "dcp_size", "enable_prefill_cp"}
"""On the page they are context parallelism."""


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path", "model", *flags])


def refusal(**changed: Any) -> str:
    args = arguments()
    vars(args).update(changed)
    with pytest.raises(ConfigError) as refused:
        refuse_modes(args, HcConfig())
    return str(refused.value)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_the_page_names_what_the_tables_refuse_and_no_more() -> None:
    tables = {flag(name) for name in (*SWITCHES, *SIZES, *VALUES, *WITH_STAGES)}
    tables -= {flag(name) for name in NAMED_OTHERWISE}
    assert tables - FLAGS == MODELS and all(f"`{one}`" in PAGE for one in MODELS)
    assert FLAGS - tables == ELSEWHERE
    assert "context parallelism" in REFUSED
    assert refuse_modes(arguments(), HcConfig()) is None, "nothing of it is on by itself"


def test_the_page_names_what_does_not_go_with_weights_in_host_memory() -> None:
    table = {flag(name) for name in offload_flags.SWITCHES.keys() - OTHERWISE_THERE}
    assert flags_in(OFFLOADING) == table | WITH_VALUES | {"--hc-offload-gb"}
    text = " ".join(OFFLOADING.split())
    assert "adapters" in text and "servers that others load from" in text
    formats, _, quantised = text.partition("other than")[2].partition("`--quantization`")
    assert re.findall(r"`(\w+)`", formats) == list(offload_flags.LOAD_FORMATS)
    assert quantised.replace(" and", ",").split(",") == [
        f" {name}" for name in offload_flags.QUANTISED_ELSEWHERE
    ]


def offload_refusal(**changed: Any) -> str:
    args = arguments()
    vars(args).update(changed)
    with pytest.raises(ConfigError) as refused:
        offload_flags.refuse_modes(args)
    return str(refused.value)


@pytest.mark.parametrize("name", offload_flags.SWITCHES)
def test_beside_weights_in_host_memory_a_switch_is_refused(name: str) -> None:
    said = offload_refusal(**{name: True})
    assert flag(name) in said and offload_flags.SWITCHES[name] in said


@pytest.mark.parametrize("quantization", offload_flags.QUANTISED_ELSEWHERE)
def test_weights_that_are_no_parameters_of_their_layer_do_not_move(quantization: str) -> None:
    assert f"--quantization {quantization}" in offload_refusal(quantization=quantization)


def test_a_loader_that_fills_other_tensors_is_refused() -> None:
    assert "tested only with auto, pt, " in offload_refusal(load_format="gguf")
    assert offload_flags.refuse_modes(arguments()) is None


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_refused(name: str) -> None:
    assert flag(name) in refusal(**{name: True})


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_refused(name: str) -> None:
    assert f"{flag(name)} above 1" in refusal(**{name: 2})


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_refused(name: str) -> None:
    value, why = VALUES[name]
    said = refusal(**{name: value})
    assert f"{flag(name)} {value}" in said and why in said and f"`{flag(name)} {value}`" in PAGE


@pytest.mark.parametrize("name", WITH_STAGES)
def test_in_a_pipeline_it_is_refused(name: str) -> None:
    value = {"speculative_algorithm": "NGRAM", "pp_async_batch_depth": 1}.get(name, True)
    assert f"{flag(name)} with --pp-size above 1" in refusal(pp_size=2, **{name: value})


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK", "FROZEN_KV_MTP"])
def test_of_speculative_algorithms_those_of_the_page_are_served(algorithm: str) -> None:
    assert algorithm in REFUSED
    said = refusal(speculative_algorithm=algorithm)
    why = "a draft model of Gemma 4" if algorithm == "FROZEN_KV_MTP" else "is not restored"
    assert f"--speculative-algorithm {algorithm}" in said and why in said
    served = PAGE.partition("- `--speculative-algorithm` ")[2].partition(", in chains")[0]
    assert set(re.findall(r"[A-Z0-9]+", served)) == set(SPECULATION)


@pytest.mark.parametrize("name", ["SGLANG_RUST_SERVER", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"])
def test_a_variable_is_refused(name: str) -> None:
    assert f"`{name}`" in REFUSED
    with getattr(envs, name).override(True):
        assert name in refusal()


def test_windows_and_recurrent_layers_together_are_refused() -> None:
    for windows, recurrent in ((False, False), (True, False), (False, True)):
        refuse_other_pools(SimpleNamespace(is_hybrid_swa=windows, is_hybrid_ssm=recurrent))
    with pytest.raises(ConfigError, match=r"both together were not tested.*--hc-disable"):
        refuse_other_pools(SimpleNamespace(is_hybrid_swa=True, is_hybrid_ssm=True))


def test_the_page_names_the_recurrent_models_that_are_refused() -> None:
    """Those whose states lie elsewhere than at the ends of blocks, and those with windows too."""
    spec = get_linear_attn_spec_by_arch("GigaChat35ForCausalLM")
    assert spec is not None and not spec.support_mamba_cache_extra_buffer
    others = overrides._MAMBA_RADIX_CACHE_ARCHS - overrides._MAMBA_EXTRA_BUFFER_ARCHS
    assert {name.partition("For")[0] for name in others} == {
        "InternS2Mobius", "JetNemotron", "JetVLM", "Lfm2", "Lfm2Moe", "Zaya",
    }  # fmt: skip
    both = filter(lambda name: is_hybrid_swa_model([name]), overrides._MAMBA_EXTRA_BUFFER_ARCHS)
    assert {name.partition("For")[0] for name in both} == {"Inkling"}
    named = {"LFM2", "Zaya", "Jet-Nemotron", "Intern-S2-Mobius", "GigaChat", "Inkling"}
    assert named <= set(RECURRENT.split())


def test_the_page_says_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (sglang,) = [one for one in project["dependencies"] if one.startswith("sglang==")]
    assert f"exactly SGLang {sglang.removeprefix('sglang==')}" in PAGE
    low, high = re.findall(r"3\.(\d+)", project["requires-python"])
    assert f"Python 3.{low} to 3.{int(high) - 1}" in PAGE


def test_each_flag_of_hicache_has_its_row() -> None:
    rows = "".join(line.split("|")[1] for line in HICACHE.splitlines() if line.startswith("|"))
    ours = {f"--{name.replace('_', '-')}" for name in hicache_flags.INSTEAD}
    assert flags_in(rows) == ours
    instead = {flag for flag in flags_in(HICACHE) if flag.startswith("--hc-")} - {"--hc-help"}
    assert instead <= {flag_of(name) for name in FLAGS_OF_OURS}
