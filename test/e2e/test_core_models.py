"""Architectures, weights and caches that no other file has: a conversation that was evicted between
its turns goes on token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import make_tiny_models
from scripts.make_tiny_models import Family, _rope_model
from support.conversations import Outcome, both, check_hits, check_same_tokens
from support.core import MODELS, run_in_child
from support.exactness import BOUND
from support.quantised import make

PUBLISHED_LATENT: dict[str, Any] = make_tiny_models.FAMILIES["deepseek-v2"].arguments | dict(
    kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=96
)
"""Of a token and layer as of DeepSeek-V2 and V3: a latent of 512 elements and a key of 64."""

EXPERTS: dict[str, Any] = dict(
    num_key_value_heads=2, head_dim=64, num_experts_per_tok=2, moe_intermediate_size=128
)

FAMILIES = {
    "one-kv-head": _rope_model("LlamaConfig", "Llama, multi-query", num_key_value_heads=1),
    "gpt-bigcode": Family(
        "GPTBigCodeConfig",
        dict(n_embd=256, n_layer=4, n_head=4, n_positions=4096, multi_query=True),
        "GPT BigCode, multi-query",
    ),
    "latent-v2": Family("DeepseekV2Config", PUBLISHED_LATENT, "DeepSeek-V2, the published row"),
    "latent-v3": Family(
        "DeepseekV3Config", PUBLISHED_LATENT | dict(n_group=1, topk_group=1), "DeepSeek-V3"
    ),
    "mixtral": _rope_model(
        "MixtralConfig", "Mixtral, two of four experts", num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
    ),
}  # fmt: skip

slow = pytest.mark.slow


def talk(name: str, folder: str, form: str, dtype: str, *flags: str) -> Outcome:
    """Of a model of FAMILIES, or one that is there."""
    model = name
    if name in FAMILIES:
        make_tiny_models.FAMILIES[name] = FAMILIES[name]
        make_tiny_models.make_models([name], Path(folder), 0, force=False)
        model = f"{folder}/{name}"
    return both(model, form, dtype, None, False, *flags)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param("one-kv-head", "recompute:2,hidden:1,kv:1", marks=slow),
        pytest.param("gpt-bigcode", "kv:4", marks=slow),
        pytest.param("qwen3-moe", "kv:4", marks=slow),
        pytest.param("mixtral", "kv:4", marks=slow),
        pytest.param("latent-v2", "recompute:2,kv:2", marks=slow),
        pytest.param("latent-v3", "kv:4", marks=slow),
    ],
)
def test_what_was_evicted_goes_on(models: None, tmp_path: Path, name: str, form: str) -> None:
    found = run_in_child(talk, name, str(tmp_path), form, "float32")
    assert found.stats["layer_plan"] == form
    check_same_tokens(found)
    assert found.worst("error") <= BOUND["float32"]
    assert found.worst("error", slice(found.layers - 1, found.layers)) == 0.0


def quantised(folder: str, form: str, *flags: str) -> Outcome:
    from support import quantised

    quantised.use()
    return both(folder, form, "bfloat16", None, False, "--quantization", "w8a8_int8", *flags)


@slow
@pytest.mark.parametrize("form", ["hidden", "recompute:2,kv:2"])
def test_weights_of_8_bits_go_on_without_hidden_states(
    models: None, tmp_path: Path, form: str
) -> None:
    """Their projections are not those of the family. Hidden form is left out, and said to be."""
    folder = make(MODELS / "llama-gqa", tmp_path / "llama-int8")
    found = run_in_child(quantised, str(folder), form)
    assert found.stats["layer_plan"] == form.replace("hidden", "kv:4")
    check_hits(found)
    if form == "hidden":
        check_same_tokens(found)
        assert found.worst("error") == 0.0
    assert found.worst("error") <= BOUND["bfloat16"]


@slow
@pytest.mark.parametrize("form", ["hidden", "recompute:2,kv:2"])
@pytest.mark.parametrize("dtype", ["fp8_e5m2", "fp8_e4m3"])
def test_a_pool_of_8_bits_comes_back_bit_by_bit(models: None, dtype: str, form: str) -> None:
    """What is computed again may be rounded to a neighbour, in few elements."""
    flags = "--kv-cache-dtype", dtype
    found = run_in_child(both, "llama-gqa", form, "bfloat16", None, False, *flags)
    assert found.stats["layer_plan"] == form.replace("hidden", "kv:4")
    check_hits(found)
    if form == "hidden":
        check_same_tokens(found)
        assert found.worst("share") == 0.0
    else:
        assert 0.0 < found.worst("share", slice(0, 2)) < 0.05, found.worst("share")
