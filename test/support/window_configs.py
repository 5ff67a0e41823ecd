"""Small models of architectures with sliding windows that only SGLang knows, or whose checkpoints
are of another shape elsewhere: a configuration alone, and weights that are made while SGLang loads
it. They need what `window_kernels` puts in place of kernels."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch

LAYERS = 4
TYPES = ["full_attention", "sliding_attention"] * 2

_COMMON: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, vocab_size=1024, max_position_embeddings=4096,
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="float32",
    rms_norm_eps=1e-5, hidden_act="silu",
)  # fmt: skip

_LLAMA4_TEXT: dict[str, Any] = _COMMON | dict(
    model_type="llama4_text", attention_chunk_size=96, intermediate_size_mlp=512,
    num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=100, use_qk_norm=False,
    attn_temperature_tuning=True, floor_scale=128, attn_scale=0.1,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    layer_types=["chunked_attention"] * 3 + ["full_attention"],
    no_rope_layers=[1, 1, 1, 0],
)  # fmt: skip

_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)

_MIMO: dict[str, Any] = _COMMON | dict(
    model_type="mimo_v2_flash",
    hybrid_layer_pattern=[0, 1, 1, 1], sliding_window_size=96, sliding_window=96, v_head_dim=32,
    swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=64, swa_v_head_dim=32,
    add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False,
    attention_bias=False, attention_value_scale=0.707, layernorm_epsilon=1e-5,
    partial_rotary_factor=0.5, rope_theta=10000.0, swa_rope_theta=1000.0,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    moe_layer_freq=[0, 1, 1, 1], n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True,
    moe_intermediate_size=128,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama4": dict(
        architectures=["Llama4ForConditionalGeneration"], model_type="llama4", dtype="float32",
        text_config=_LLAMA4_TEXT,
        vision_config=dict(
            hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=256,
            vision_output_dim=64, projector_input_dim=64, projector_output_dim=64, image_size=28,
        ),
        boi_token_index=1020, eoi_token_index=1021, image_token_index=1022,
    ),
    "mimo-v2": _MIMO | dict(architectures=["MiMoV2FlashForCausalLM"]),
    "mimo-v2.5": _MIMO | dict(architectures=["MiMoV2ForCausalLM"]),
    "step3.5": _COMMON | dict(
        architectures=["Step3p5ForCausalLM"], model_type="step3p5", layer_types=TYPES,
        sliding_window=96, num_attention_groups=2,
        allow_global_per_layer_attribute_access=True,
        attention_other_setting=dict(
            attention_type="sliding_attention", num_attention_heads=8, num_attention_groups=2,
            head_dim=64, true_head_dim=64,
        ),
        moe_layers_enum="2,3", moe_num_experts=4, moe_top_k=2, moe_intermediate_size=128,
        share_expert_dim=128, moe_router_scaling_factor=1.0, use_moe_router_bias=True,
        need_fp32_gate=True, rope_theta=[10000.0, 1000.0] * 2, rope_scaling=None,
        yarn_only_types=[], partial_rotary_factors=[0.5, 1.0] * 2, use_head_wise_attn_gate=True,
        swiglu_limits=[0.0] * LAYERS, swiglu_limits_shared=[0.0] * LAYERS,
    ),
    "laguna": _COMMON | _EXPERTS | dict(
        architectures=["LagunaForCausalLM"], model_type="laguna", layer_types=TYPES,
        sliding_window=96, shared_expert_intermediate_size=128,
        num_attention_heads_per_layer=[4, 8] * 2, gating=True,
        mlp_layer_types=["dense"] + ["sparse"] * 3,
    ),
    "mellum": _COMMON | _EXPERTS | dict(
        architectures=["MellumForCausalLM"], model_type="mellum", layer_types=TYPES,
        sliding_window=96, mlp_layer_types=["dense"] + ["sparse"] * 3,
    ),
    "granite-swa": _COMMON | dict(
        architectures=["GraniteSWAForCausalLM"], model_type="granite_swa", layer_types=TYPES,
        sliding_window=96, attention_multiplier=0.1,
    ),
    "spark2.5": _COMMON | dict(
        architectures=["Spark2_5ForCausalLM"], model_type="spark2_5", layer_types=TYPES,
        sliding_window=96,
    ),
}  # fmt: skip


def make(folder: Path, *names: str) -> None:
    """Write folder/NAME/config.json of each, or of those named, with a tokenizer."""
    from scripts.make_tiny_models import build_tokenizer

    tokenizer = build_tokenizer(1024, 4096)
    for name in names or CONFIGS:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(CONFIGS[name]))
        tokenizer.save_pretrained(folder / name)


FLAGS = "--load-format", "dummy"


def use() -> None:
    """In this process SGLang's dummy weights are those of `fill`."""
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = fill


def fill(model: torch.nn.Module) -> None:
    """Weights by their names, so that what is said next depends on all that was said before, as in
    `make_tiny_models`: attention picks few tokens, and what it adds outweighs the rest."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point():
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            normal = torch.randn(weight.shape, generator=seed)
            with torch.no_grad():
                weight.copy_(_centre(name) + _spread(name, weight) * normal)


def _centre(name: str) -> float:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 2.0
    return 1.0 if name.endswith("norm.weight") else 0.0


def _spread(name: str, weight: torch.Tensor) -> float:
    if weight.ndim < 2 or "embed" in name:
        return 0.1
    gain = {"qkv_proj": 2.0, "o_proj": 8.0}.get(name.split(".")[-2], 1.0)
    return float(gain / weight.shape[-1] ** 0.5)
