"""What goes into the QKV projection of each layer, which is what is kept of a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_hc.srt.model.families import LayerAdapter


class ProjectionInputs:
    """Of the layer that runs: passes have no CUDA graphs here, so a reference will do."""

    def __init__(self, layers: Sequence[LayerAdapter]) -> None:
        self._found: list[torch.Tensor | None] = [None] * len(layers)
        for index, layer in enumerate(layers):
            self._tap(index, layer.qkv)

    def _tap(self, index: int, projection: torch.nn.Module) -> None:
        def tap(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._found[index] = args[0] if args else kwargs["hidden_states"]

        projection.register_forward_pre_hook(tap, with_kwargs=True)

    def of(self, layer: int) -> torch.Tensor:
        """(tokens of the pass, hidden size)."""
        found = self._found[layer]
        assert found is not None, "a layer attends before it projects"
        return found

    def drop(self, layer: int) -> None:
        """Its memory is free for others."""
        self._found[layer] = None
