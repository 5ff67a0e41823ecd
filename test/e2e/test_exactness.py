"""Per family and form: a conversation that was evicted between turns goes on token for token.

KV form is a copy and float32 has room to spare, so tokens are the same on every machine. In 16-bit
types hidden form is bit-identical where the product of the model's QKV projection does not depend
on the number of rows; each test asks that first (`support/exactness.py`) and asserts bit identity,
or else the documented bound. oneDNN's ONEDNN_MAX_CPU_ISA shows other machines on this one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import make_tiny_models
from support.conversations import Outcome, both, check_16_bit, check_hits, check_same_tokens
from support.core import run_in_child
from support.exactness import BOUND, ISAS, SHARE, near_tie

FAMILIES = [
    "llama-mha", "llama-gqa", "mistral", "qwen2", "qwen3", "gemma", "phi", "opt", "gpt2",
    "granite", "starcoder2",
]  # fmt: skip
FEW = ["llama-gqa", "qwen3", "opt"]
BY_NIGHT = [pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS]
"""Rotary embedding over grouped heads, K norm, biases with learned positions."""


@pytest.mark.parametrize("isa", [None, *BY_NIGHT])
@pytest.mark.parametrize(
    "model",
    [model if model in FEW else pytest.param(model, marks=pytest.mark.slow) for model in FAMILIES],
)
def test_hidden_form_bfloat16(models: None, model: str, isa: str | None) -> None:
    found = run_in_child(both, model, "hidden", "bfloat16", isa)
    assert found.stats["layer_plan"].startswith("hidden")
    check_16_bit(found, "bfloat16")


@pytest.mark.parametrize("isa", [None, *BY_NIGHT])
@pytest.mark.parametrize("model", FEW)
def test_mixed_plan_bfloat16(models: None, model: str, isa: str | None) -> None:
    found = run_in_child(both, model, "hidden:2,kv:2", "bfloat16", isa)
    assert found.stats["layer_plan"] == "hidden:2,kv:2"
    check_16_bit(found, "bfloat16")
    assert found.worst("error", slice(2, 4)) == 0.0


@pytest.mark.parametrize("isa", [ISAS[0], BY_NIGHT[1]])
def test_hidden_form_float16(models: None, isa: str) -> None:
    found = run_in_child(both, "llama-mha", "hidden", "float16", isa)
    check_16_bit(found, "float16")


@pytest.mark.parametrize("isa", [ISAS[0], BY_NIGHT[1]])
def test_float32_with_other_instructions(models: None, isa: str) -> None:
    found = run_in_child(both, "llama-gqa", "recompute:2,hidden:1,kv:1", "float32", isa)
    check_same_tokens(found)
    assert found.worst("error") <= BOUND["float32"]


@pytest.mark.parametrize("model", [*FAMILIES, "deepseek-v2"])
def test_every_form_float32(models: None, model: str) -> None:
    """The family's own embedding step and layers, one layer of hidden states, one of KV."""
    plan = "recompute:2,kv:2" if model == "deepseek-v2" else "recompute:2,hidden:1,kv:1"
    found = run_in_child(both, model, plan, "float32")
    assert found.stats["layer_plan"] == plan
    assert found.stats["recomputed_layer_tokens"] == 2 * sum(found.evicted["host"])
    check_same_tokens(found)
    assert found.worst("error") <= BOUND["float32"]
    assert found.worst("error", slice(found.layers - 1, found.layers)) == 0.0


def of_another_family(config: str, folder: str) -> Outcome:
    family = make_tiny_models._rope_model(config, "", head_dim=64, num_key_value_heads=2)
    make_tiny_models.FAMILIES[config] = family
    make_tiny_models.make_models([config], Path(folder), 0, force=False)
    return both(f"{folder}/{config}", "hidden:2,kv:2", "float32")


@pytest.mark.parametrize("config", ["Gemma3TextConfig", "deepseek-v2"])
def test_where_hidden_states_were_never_checked_kv_is_kept(
    models: None, config: str, tmp_path: Path
) -> None:
    if config == "deepseek-v2":
        found = run_in_child(both, config, "hidden:2,kv:2", "float32")
    else:
        found = run_in_child(of_another_family, config, str(tmp_path))
    assert found.stats["layer_plan"] == "kv:4"
    check_same_tokens(found)
    assert found.worst("error") == 0.0


def test_a_pool_of_another_type_takes_kv_form_and_recomputed_layers(models: None) -> None:
    plan, flags = "recompute:1,hidden:1,kv:2", ("--kv-cache-dtype", "bfloat16")
    found = run_in_child(both, "llama-mha", plan, "float32", None, False, *flags)
    assert found.stats["layer_plan"] == "recompute:1,kv:3"
    check_hits(found)
    assert found.worst("error", slice(0, 1)) <= BOUND["bfloat16"]


def test_recomputed_layers_bfloat16(models: None) -> None:
    """A prefill of what decode steps wrote first: rounded elsewhere, by a place or two."""
    found = run_in_child(both, "llama-gqa", "recompute:2,hidden:1,kv:1", "bfloat16")
    assert found.evicted["host"] == found.kept["device"]
    assert found.evicted["tokens"][0] == found.kept["tokens"][0]
    assert 0.0 < found.worst("error") <= 2**-7
    assert found.stats["exactness"] == "rounding"
    assert 0.0 < found.stats["exactness_difference"] <= 2**-7


@pytest.mark.parametrize(("form", "dtype"), [("kv", "float32"), ("hidden", "bfloat16")])
def test_restored_garbage_is_noticed(models: None, form: str, dtype: str) -> None:
    """The control: were restored state not used, or not compared, the tests would be blind. Each
    of the criteria for machines whose products depend on the rows notices it too."""
    found = run_in_child(both, "llama-mha", form, dtype, None, True)
    assert found.evicted["host"] == found.kept["device"]
    assert found.evicted["tokens"][1:] != found.kept["tokens"][1:]
    assert found.worst("error") > 0.1 > BOUND[dtype]
    assert found.worst("share") > 0.5 > SHARE
    assert near_tie(found.kept, found.evicted) != []
