"""Models of the papers, and what the data sheet of one GPU says they cost."""

from __future__ import annotations

from typing import Any

from sglang_hc.tools.datasheet import datasheet_costs, load_hardware
from sglang_hc.tools.model_shape import ModelShape

LLAMA2_7B: dict[str, Any] = dict(
    model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
    intermediate_size=11008, torch_dtype="float16",
)  # fmt: skip
LLAMA31_8B = LLAMA2_7B | dict(num_key_value_heads=8, intermediate_size=14336)
DEEPSEEK_V3: dict[str, Any] = dict(
    model_type="deepseek_v3", hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
    num_key_value_heads=128, intermediate_size=18432, moe_intermediate_size=2048,
    kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128,
    v_head_dim=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=3, moe_layer_freq=1, torch_dtype="bfloat16",
)  # fmt: skip
DEEPSEEK_V32 = DEEPSEEK_V3 | dict(
    model_type="deepseek_v32", index_topk=2048, index_n_heads=64, index_head_dim=128
)

SHAPE = ModelShape.from_config(LLAMA2_7B)
A100 = datasheet_costs(load_hardware("A100-40G"), SHAPE, 26e9, 6.9e9)
"""Of the 7B model, with a link of 26 GB/s and a disk of 6.9."""
