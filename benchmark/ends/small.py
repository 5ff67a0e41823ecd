"""Small random models of each kind of layer, in the shape of published ones.

Weights are as in scripts/make_tiny_models.py: greedy replies depend on the whole prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts import make_tiny_models
from scripts.make_tiny_models import FAMILIES, Family, make_models

KINDS = ("plain", "windows", "states", "index")

NARROW, WIDE = (4, 256), (8, 512)
"""Layers and width: to rehearse, and to measure."""

_centre = make_tiny_models._centre


def family(kind: str, layers: int, width: int, *, on_cpu: bool) -> Family:
    """A checkpoint of one of KINDS. on_cpu: of two or four heads of values that share one of keys
    SGLang has a kernel for a GPU only."""
    plain: dict[str, Any] = dict(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    experts: dict[str, Any] = dict(num_experts_per_tok=2)
    if kind == "windows":
        types = ["sliding_attention", "full_attention"] * (layers // 2)
        more = dict(layer_types=types, sliding_window=128, num_local_experts=4)
        return Family("GptOssConfig", plain | experts | more, "gpt-oss: every other layer a window")
    if kind == "states":
        more = dict(
            layer_types=[*(["linear_attention"] * 3), "full_attention"] * (layers // 4),
            full_attention_interval=4, linear_num_key_heads=2,
            linear_num_value_heads=6 if on_cpu else 4,
            linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
            num_experts=4, moe_intermediate_size=width // 2, decoder_sparse_step=1,
            shared_expert_intermediate_size=width // 2, mlp_only_layers=[],
        )  # fmt: skip
        return Family("Qwen3NextConfig", plain | experts | more, "Qwen3-Next: three of four")
    if kind == "index":
        latent = FAMILIES["deepseek-v2"].arguments
        more = dict(
            num_key_value_heads=width // 64, head_dim=32, q_lora_rank=96, index_topk=256,
            index_n_heads=4, index_head_dim=128, n_group=1, topk_group=1,
            first_k_dense_replace=layers,
        )  # fmt: skip
        return Family("DeepseekV32Config", latent | plain | more, "DeepSeek-V3.2, dense")
    return Family("LlamaConfig", plain, "Llama, grouped queries")


def make(folder: Path, kind: str, size: tuple[int, int], *, on_cpu: bool) -> Path:
    """Write the checkpoint, unless it is there; models of other kinds are as before."""
    name = f"{kind}-{size[0]}-{size[1]}"
    make_tiny_models._centre = _lasting
    FAMILIES[name] = family(kind, *size, on_cpu=on_cpu)
    make_models([name], folder, 0, force=False)
    return folder / name


def _lasting(module_name: str, module: Any, name: str) -> float:
    """What a recurrent layer keeps lasts for hundreds of tokens."""
    return -5.0 if name == "A_log" else _centre(module_name, module, name)
