"""Published configurations of models whose layers do not all have full attention, as far as what is
kept of them depends on it."""

from __future__ import annotations

WINDOWS = ["sliding_attention", "full_attention"]
GPT_OSS_20B = dict(
    model_type="gpt_oss", num_hidden_layers=24, layer_types=12 * WINDOWS, sliding_window=128,
    num_attention_heads=64, num_key_value_heads=8, head_dim=64, hidden_size=2880,
    torch_dtype="bfloat16",
)  # fmt: skip
GPT_OSS_120B = GPT_OSS_20B | dict(num_hidden_layers=36, layer_types=18 * WINDOWS)
QWEN3_NEXT_80B = dict(
    model_type="qwen3_next", num_hidden_layers=48, full_attention_interval=4, hidden_size=2048,
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_conv_kernel_dim=4,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, torch_dtype="bfloat16",
)  # fmt: skip
MODELS = {
    "gpt-oss 20B": GPT_OSS_20B, "gpt-oss 120B": GPT_OSS_120B, "Qwen3-Next 80B-A3B": QWEN3_NEXT_80B,
}  # fmt: skip
