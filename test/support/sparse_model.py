"""A small random model with sparse attention, as DeepSeek-V3.2 has it: latent attention to the
tokens that an index of 8-bit keys chooses. It chooses fewer than the tests' prompts have.

    PYTHONPATH=python:test:. python -m support.sparse_model FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts import make_tiny_models

NAME = "deepseek-v3.2"

TOPK = 64
"""Tokens that each token attends to."""

CONFIG: dict[str, Any] = dict(
    make_tiny_models.FAMILIES["deepseek-v2"].arguments, q_lora_rank=96, num_key_value_heads=4,
    head_dim=32, index_topk=TOPK, index_n_heads=4, index_head_dim=128, n_group=1, topk_group=1,
)  # fmt: skip

REAL: dict[str, Any] = dict(
    model_type="deepseek_v32", hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
    num_key_value_heads=128, intermediate_size=18432, moe_intermediate_size=2048,
    kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128,
    v_head_dim=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=3, moe_layer_freq=1, index_topk=2048, index_n_heads=64,
    index_head_dim=128, torch_dtype="bfloat16",
)  # fmt: skip
"""The published model's numbers."""


def make(folder: Path) -> str:
    """Write the checkpoint in a process of its own. Returns its path."""
    subprocess.run([sys.executable, "-m", "support.sparse_model", str(folder)], check=True)
    return str(folder / NAME)


if __name__ == "__main__":
    make_tiny_models.FAMILIES[NAME] = make_tiny_models.Family(
        "DeepseekV32Config", CONFIG, "DeepSeek-V3.2, sparse attention, dense"
    )
    make_tiny_models.make_models([NAME], Path(sys.argv[1]), 0, False)
