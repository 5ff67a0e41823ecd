"""A small random model with sparse attention, as DeepSeek-V3.2 has it: latent attention to the
tokens that an index of 8-bit keys chooses. It chooses fewer than the tests' prompts have.

    PYTHONPATH=test:. python -m support.sparse_model FOLDER
"""

from __future__ import annotations

import os
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


def make(folder: Path) -> str:
    """Write the checkpoint in a process of its own. Returns its path."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-m", __name__, str(folder)], check=True, env=env)
    return str(folder / NAME)


if __name__ == "__main__":
    make_tiny_models.FAMILIES[NAME] = make_tiny_models.Family(
        "DeepseekV32Config", CONFIG, "DeepSeek-V3.2, sparse attention, dense"
    )
    make_tiny_models.make_models([NAME], Path(sys.argv[1]), 0, False)
