"""Published configurations of models whose layers do not all have full attention, as far as what is
kept of them, and computing it, depends on it."""

from __future__ import annotations

from typing import Any

WINDOWS = ["sliding_attention", "full_attention"]
GPT_OSS_20B: dict[str, Any] = dict(
    model_type="gpt_oss", num_hidden_layers=24, layer_types=12 * WINDOWS, sliding_window=128,
    num_attention_heads=64, num_key_value_heads=8, head_dim=64, hidden_size=2880,
    intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4, torch_dtype="bfloat16",
)  # fmt: skip
GPT_OSS_120B: dict[str, Any] = GPT_OSS_20B | dict(
    num_hidden_layers=36, layer_types=18 * WINDOWS, num_local_experts=128
)
GEMMA_4_31B: dict[str, Any] = dict(
    model_type="gemma4", dtype="bfloat16",
    text_config=dict(
        model_type="gemma4_text", num_hidden_layers=60, sliding_window=1024, hidden_size=5376,
        layer_types=10 * [*(5 * ["sliding_attention"]), "full_attention"],
        num_attention_heads=32, num_key_value_heads=16, head_dim=256, attention_k_eq_v=True,
        global_head_dim=512, num_global_key_value_heads=4, intermediate_size=21504,
    ),
)  # fmt: skip
QWEN3_NEXT_80B: dict[str, Any] = dict(
    model_type="qwen3_next", num_hidden_layers=48, full_attention_interval=4, hidden_size=2048,
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_conv_kernel_dim=4,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, intermediate_size=5120, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10,
    decoder_sparse_step=1, torch_dtype="bfloat16",
)  # fmt: skip
QWEN3_5_27B: dict[str, Any] = dict(
    model_type="qwen3_5",
    text_config=dict(
        model_type="qwen3_5_text", num_hidden_layers=64, full_attention_interval=4,
        hidden_size=5120, num_attention_heads=24, num_key_value_heads=4, head_dim=256,
        linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_num_key_heads=16, linear_num_value_heads=48, intermediate_size=17408,
        mamba_ssm_dtype="float32", dtype="bfloat16",
    ),
)  # fmt: skip
NEMOTRON_3_NANO: dict[str, Any] = dict(
    model_type="nemotron_h", num_hidden_layers=52, hidden_size=2688,
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    num_attention_heads=32, num_key_value_heads=2, head_dim=128, mamba_num_heads=64,
    mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4, torch_dtype="bfloat16",
)  # fmt: skip
KIMI_LINEAR_48B: dict[str, Any] = dict(
    model_type="kimi_linear", num_hidden_layers=27, hidden_size=2304, num_attention_heads=32,
    kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=None,
    linear_attn_config=dict(
        full_attn_layers=[4, 8, 12, 16, 20, 24, 27], num_heads=32, head_dim=128,
        short_conv_kernel_size=4,
    ),
    intermediate_size=9216, moe_intermediate_size=1024, num_experts=256, num_experts_per_token=8,
    num_shared_experts=1, first_k_dense_replace=1, moe_layer_freq=1, torch_dtype="bfloat16",
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss 20B": GPT_OSS_20B,
    "gpt-oss 120B": GPT_OSS_120B,
    "Gemma 4 31B": GEMMA_4_31B,
    "Qwen3-Next 80B-A3B": QWEN3_NEXT_80B,
    "Qwen3.5 27B": QWEN3_5_27B,
    "Nemotron 3 Nano 30B-A3B": NEMOTRON_3_NANO,
    "Kimi Linear 48B-A3B": KIMI_LINEAR_48B,
}
