"""Small random models with recurrent layers: every other layer keeps a state in place of K and V.

PYTHONPATH=test:. python -m support.state_model FOLDER
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts import make_tiny_models
from scripts.make_tiny_models import FAMILIES, Family, make_models

_SHAPE: dict[str, Any] = dict(
    FAMILIES["qwen3"].arguments, linear_num_key_heads=2, linear_num_value_heads=6,
    linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "full_attention"] * 2, full_attention_interval=2,
)  # fmt: skip

_COMMON: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip

MODELS = {
    "qwen3-next": Family(
        "Qwen3NextConfig",
        _SHAPE | dict(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
            shared_expert_intermediate_size=128, decoder_sparse_step=1, mlp_only_layers=[],
        ),
        "Qwen3-Next, gated delta rule, two of four experts",
    ),
    "granite-4": Family(
        "GraniteMoeHybridConfig",
        FAMILIES["granite"].arguments | dict(
            layer_types=["mamba", "attention"] * 2, num_local_experts=0,
            shared_intermediate_size=512, position_embedding_type="nope", mamba_n_heads=8,
            mamba_d_head=64, mamba_d_state=32, mamba_n_groups=1, mamba_chunk_size=64,
        ),
        "Granite 4, Mamba2, dense, no positions",
    ),
    "qwen3.5": Family("Qwen3_5TextConfig", _SHAPE, "Qwen3.5, gated delta rule, dense"),
    "kimi-linear": Family(
        "KimiLinearConfig",
        _COMMON | dict(
            num_key_value_heads=4, kv_lora_rank=64, q_lora_rank=None, qk_nope_head_dim=32,
            qk_rope_head_dim=32, v_head_dim=32, mla_use_nope=True, num_local_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=128, n_shared_experts=1,
            first_k_dense_replace=0,
            routed_scaling_factor=1.0,  # SGLang's experts leave it out on a CPU
            linear_attn_config=dict(
                num_heads=4, head_dim=32, short_conv_kernel_size=4, kda_layers=[1, 3],
                full_attn_layers=[2, 4],
            ),
        ),
        "Kimi Linear, a delta rule with gates of channels, latent attention, two of four experts",
    ),
    "nemotron-h": Family(
        "NemotronHConfig",
        _COMMON | dict(
            hybrid_override_pattern="M*-M*-", head_dim=64, mamba_num_heads=8, mamba_head_dim=64,
            ssm_state_size=32, n_groups=8, chunk_size=64,
        ),
        "Nemotron-H, Mamba2, layers of MLPs alone, no positions",
    ),
    "falcon-h1": Family(
        "FalconH1Config",
        _COMMON | dict(
            head_dim=64, mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=32,
            mamba_n_groups=1, mamba_chunk_size=128, mamba_rms_norm=False, rope_theta=100000.0,
        ),
        "Falcon-H1, Mamba2 and attention in each layer, a state each 128 tokens",
    ),
}  # fmt: skip

EXPERTS = Family(
    "Qwen3_5MoeTextConfig", MODELS["qwen3-next"].arguments, "Qwen3.5, two of four experts"
)

PUBLISHED = {"qwen3.5-vl": "qwen3.5", "qwen3.5-moe-vl": "qwen3.5-moe"}
"""Checkpoints in the shape in which they are published, with an encoder of images before them, by
the model that they have the weights of."""

_VISION: dict[str, Any] = dict(
    depth=1, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=256, patch_size=16,
    spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=256,
    deepstack_visual_indexes=[],
)  # fmt: skip


def architecture_of(name: str) -> str:
    """Of one of PUBLISHED."""
    return f"Qwen3_5{'Moe' if 'moe' in name else ''}ForConditionalGeneration"


def step_of(model: str) -> int:
    """Tokens between two places where a model leaves states. model: its path."""
    known = MODELS.get(Path(model).name)
    return 64 if known is None else int(known.arguments.get("mamba_chunk_size", 64))


_fill = make_tiny_models.fill_weights


def fill_weights(model: Any, *args: Any) -> None:
    """What a recurrent layer keeps lasts for hundreds of tokens."""
    _fill(model, *args)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data -= 5.0


def make(folder: Path) -> None:
    """Write the checkpoints, folder/NAME, in a process of its own."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-m", __name__, str(folder)], check=True, env=env)


def publish(folder: Path) -> None:
    """Call layers what published checkpoints of Nemotron-H call them, and write PUBLISHED."""
    config = folder / "nemotron-h" / "config.json"
    text = config.read_text().replace("linear_attention", "mamba")
    config.write_text(text.replace("full_attention", "attention"))
    for name, model in PUBLISHED.items():
        shutil.copytree(folder / model, folder / name, dirs_exist_ok=True)
        own = json.loads((folder / name / "config.json").read_text())
        own["rope_parameters"] |= dict(mrope_section=[4, 2, 2], mrope_interleaved=True)
        outer = dict(
            architectures=[architecture_of(name)], dtype="float32", tie_word_embeddings=False,
            model_type=own["model_type"].removesuffix("_text"), text_config=own,
            vision_config=_VISION, image_token_id=1020, video_token_id=1021,
            vision_start_token_id=1022, vision_end_token_id=1023,
        )  # fmt: skip
        (folder / name / "config.json").write_text(json.dumps(outer))


if __name__ == "__main__":
    make_tiny_models.fill_weights = fill_weights
    FAMILIES.update(MODELS | {"qwen3.5-moe": EXPERTS})
    make_models([*MODELS, "qwen3.5-moe"], Path(sys.argv[1]), 0, False)
    publish(Path(sys.argv[1]))
