"""Small random models with sliding windows that have a pool of their own in SGLang: every second
layer attends to its last tokens alone.

    PYTHONPATH=test:. python -m support.window_model FOLDER
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
    hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    max_position_embeddings=4096, layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(
    intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
)
_GEMMA: dict[str, Any] = dict(
    intermediate_size=512, tie_word_embeddings=True, hidden_size_per_layer_input=0,
    num_kv_shared_layers=0, vocab_size_per_layer_input=1024,
)  # fmt: skip

MODELS = {
    "gpt-oss": Family(
        "GptOssConfig", _SHAPE | _EXPERTS | dict(sliding_window=128), "gpt-oss: sinks, two blocks"
    ),
    "gpt-oss-96": Family(
        "GptOssConfig", _SHAPE | _EXPERTS | dict(sliding_window=96), "gpt-oss, a block and a half"
    ),
    "gemma4": Family(
        "Gemma4TextConfig",
        _SHAPE | _GEMMA | dict(
            sliding_window=96, global_head_dim=64, swa_num_key_value_heads=2
        ),
        "Gemma 4, dense, heads of one width",
    ),
}  # fmt: skip

PUBLISHED = "gemma4-mm"
"""Gemma 4 in the shape in which it is published, with an encoder of images before it."""

_VISION: dict[str, Any] = dict(
    model_type="gemma4_vision", hidden_size=64, intermediate_size=128, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, head_dim=32, position_embedding_size=64,
)  # fmt: skip


_centre, _embedding_std = make_tiny_models._centre, make_tiny_models._embedding_std


def centre(module_name: str, module: Any, name: str) -> float:
    """Of Gemma 4, whose norms are stored as they are. It does not scale the product of query and
    key, and has a norm behind what attention adds, which is to outweigh the rest."""
    if not type(module).__name__.startswith("Gemma4"):
        return _centre(module_name, module, name)
    last = module_name.rsplit(".", 1)[-1]
    return {"q_norm": 0.7, "k_norm": 0.7, "post_attention_layernorm": 4.0}.get(last, 1.0)


def embedding_std(model: Any) -> float:
    """Gemma 4 multiplies embeddings by the root of the hidden size, as Gemma does."""
    gemma = model.config.model_type.startswith("gemma")
    return 0.1 / model.config.hidden_size**0.5 if gemma else _embedding_std(model)


def make(folder: Path, *names: str) -> None:
    """Write the checkpoints, folder/NAME, in a process of its own."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", __name__, str(folder), *names]
    subprocess.run(command, check=True, env=env)


def publish(folder: Path) -> None:
    """Write PUBLISHED, with the weights of Gemma 4 in `folder`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder / "gemma4", folder / PUBLISHED, dirs_exist_ok=True)
    own = json.loads((folder / PUBLISHED / "config.json").read_text())
    outer = dict(
        architectures=["Gemma4ForConditionalGeneration"], model_type="gemma4", dtype="float32",
        text_config=own, vision_config=_VISION, audio_config=None, image_token_id=1020,
        video_token_id=1021, audio_token_id=1022, boi_token_id=1023, eoi_token_id=1019,
    )  # fmt: skip
    (folder / PUBLISHED / "config.json").write_text(json.dumps(outer))
    weights = folder / PUBLISHED / "model.safetensors"
    named = load_file(weights).items()
    inner = {name.replace("model.", "model.language_model.", 1): one for name, one in named}
    save_file(inner, weights, {"format": "pt"})


if __name__ == "__main__":
    make_tiny_models._centre, make_tiny_models._embedding_std = centre, embedding_std
    FAMILIES.update(MODELS)
    names = sys.argv[2:] or list(MODELS)
    make_models(names, Path(sys.argv[1]), 0, False)
    if "gemma4" in names:
        publish(Path(sys.argv[1]))
