"""Small random models with sparse attention: latent attention to the tokens that an index of 8-bit
keys chooses. It chooses fewer than the tests' prompts have.

    PYTHONPATH=test:. python -m support.sparse_model FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.make_tiny_models import FAMILIES, Family, make_models

_SHAPE: dict[str, Any] = dict(
    FAMILIES["deepseek-v2"].arguments, q_lora_rank=96, num_key_value_heads=4, head_dim=32,
    index_topk=64, index_n_heads=4, index_head_dim=128, n_group=1, topk_group=1,
)  # fmt: skip

MODELS = {
    "deepseek-v3.2": Family("DeepseekV32Config", _SHAPE, "DeepSeek-V3.2, dense"),
    "glm-5": Family(
        "GlmMoeDsaConfig",
        _SHAPE | dict(
            mlp_layer_types=["dense"] * 4, indexer_types=["full", "shared", "full", "full"]
        ),
        "GLM-5, dense; a layer attends to what the layer before it chose, and has no index",
    ),
}  # fmt: skip


def make(folder: Path) -> None:
    """Write the checkpoints, folder/NAME, in a process of its own."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-m", __name__, str(folder)], check=True, env=env)


if __name__ == "__main__":
    FAMILIES.update(MODELS)
    make_models(list(MODELS), Path(sys.argv[1]), 0, False)
