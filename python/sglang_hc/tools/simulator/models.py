"""Models of a simulation: bytes per block, context window, GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hc.errors import ConfigError
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan
from sglang_hc.policy.served import REFUSED
from sglang_hc.tools.datasheet import HostWork
from sglang_hc.tools.model_config import read_model_config
from sglang_hc.tools.model_shape import ModelShape

_LLAMA = {"model_type": "llama", "torch_dtype": "float16"}
_SHIPPED: dict[str, tuple[dict[str, Any], int, int]] = {
    # name: (config, context window, GPUs), as AttentionStore section 4.1 runs them
    "llama-13b": (
        {
            **_LLAMA,
            "num_hidden_layers": 40,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "intermediate_size": 13824,
        },
        4096,
        2,
    ),
    "llama-65b": (
        {
            **_LLAMA,
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "intermediate_size": 22016,
        },
        2048,
        4,
    ),
    "llama-70b": (
        {
            **_LLAMA,
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
        },
        4096,
        4,
    ),
    "falcon-40b": (
        {
            "model_type": "falcon",
            "torch_dtype": "float16",
            "num_hidden_layers": 60,
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
        2048,
        4,
    ),
}
MODEL_NAMES = tuple(_SHIPPED)

_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


@dataclass(frozen=True)
class SimulatedModel:
    """One model in one layer plan.

    shape: None where only a profile says what it costs. context: window in tokens. host_work: of
    the server that runs it.
    """

    name: str
    shape: ModelShape | None
    layout: BlockLayout
    context: int
    gpus: int
    host_work: HostWork

    @property
    def slot_bytes(self) -> int:
        """Stored bytes of one block, padding included."""
        return self.layout.slot_bytes

    @property
    def token_bytes(self) -> float:
        return self.layout.slot_bytes / BLOCK_TOKENS


PAPER_HOST_WORK = HostWork(step=0.85e-3, prompt=0.4e-3)
"""Of the paper's executor, Transformers run eagerly. Not in the paper. Assumed: a layer of a decode
step takes 0.85 ms, which serves 24 requests of different lengths. That of a prompt is bounded by
the paper: 13B's prompts of 121 ms (at 185 TFLOP/s) come 85 % sooner (section 4.2), so 40 layers
take at most 18 ms, a layer 0.45. The simulator's benchmark page shows how much this matters.
"""
SERVER_HOST_WORK = HostWork(20e-6, 20e-6)
"""With CUDA graphs."""


def load_model(
    name_or_path: str, forms: str = "kv", gpus: int | None = None, context: int | None = None
) -> SimulatedModel:
    """A shipped model by name, or any other from its config.json or the folder that holds one.

    Raises ConfigError with the known names, or with what is wrong with the file or the plan.
    """
    config: Mapping[str, Any]
    if name_or_path in _SHIPPED:
        config, window, cards = _SHIPPED[name_or_path]
        work, where = PAPER_HOST_WORK, name_or_path
    else:
        if not Path(name_or_path).exists():
            raise ConfigError(
                f"unknown model {name_or_path!r}: give one of {', '.join(MODEL_NAMES)}, or a "
                "config.json"
            )
        config, where = read_model_config(name_or_path)
        window = context or _window(config, where)
        cards, work = 1, SERVER_HOST_WORK
    shape = ModelShape.from_config(config, where=where)
    if shape.architecture in REFUSED:
        raise ConfigError(
            f"{where}: {shape.architecture} is refused by a server with the tiers, as "
            "docs/models.md says; only models that are served can be simulated"
        )
    layout = BlockLayout(LayerPlan.parse(forms, shape.num_layers), shape.state_shape())
    if not layout.slot_bytes:
        raise ConfigError(f"forms {forms!r} stores nothing; give a plan with hidden or kv layers")
    return SimulatedModel(Path(where).name, shape, layout, context or window, gpus or cards, work)


def _window(config: Mapping[str, Any], where: str) -> int:
    inner = config.get("text_config")
    for source in (config, inner if isinstance(inner, Mapping) else {}):
        for name in _CONTEXT:
            value = source.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    raise ConfigError(f"{where}: has no max_position_embeddings; give --context")
