"""States of recurrent layers: SGLang's pool of them, as bytes of a row of the host's end parts.

A state slot has what every recurrent layer of this rank needs to go on behind one token: the last
inputs of its convolutions, and its recurrence. All layers of a slot are read and written together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool

from sglang_hc.forms import EndLayout, StateLayers
from sglang_hc.restore.restore_pass import LayerGate
from sglang_hc.srt.model.kv_pool import UnsupportedPool

Fill = Callable[[list[torch.Tensor], int, int, int], None]
"""As `capture.snapshots.Fill`, of rows that are states."""


class StatePool:
    """Belongs to the scheduler thread, on the compute stream. A slot is a (1,) tensor on the pool's
    device, so that no number has to come from there."""

    def __init__(self, pool: Any) -> None:
        """pool: SGLang's `MambaPool`. Raises UnsupportedPool."""
        _refuse(pool)
        state = pool.mamba_cache
        tensors = [*state.conv, *([state.temporal] if state.temporal.numel() else [])]
        # (layers, slots, bytes) uint8 views of one part of the states each.
        self._parts = [part.flatten(2).view(torch.uint8) for part in tensors]
        self.layers = StateLayers(
            tuple(pool.mamba_layer_ids),
            tuple(part.shape[2] for part in self._parts),
            tuple(str(part.dtype).removeprefix("torch.") for part in tensors),
        )
        self.device: torch.device = tensors[0].device

    @property
    def layout(self) -> EndLayout:
        """What is kept of them."""
        return EndLayout(state=self.layers)

    def read(self, slot: torch.Tensor) -> Fill:
        """Writes the state of a slot to row `at` of (layers, rows, part bytes) uint8 targets, one
        for each part, of any device."""

        def fill(targets: list[torch.Tensor], at: int, first: int, count: int) -> None:
            for part, target in zip(self.copy(slot), targets, strict=True):
                target[:, at : at + count] = part

        return fill

    def copy(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """The state of a slot, (layers, 1, part bytes) uint8 for each part."""
        return [part.index_select(1, slot) for part in self._parts]

    def clear(self, slot: torch.Tensor) -> None:
        """Make the state of a slot that of no token."""
        for part in self._parts:
            part.index_fill_(1, slot, 0)

    def write(self, rows: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        """Make the state of a slot what `rows` are, (layers, 1, part bytes) uint8 for each part in
        host memory, whose bytes stay as they are until the work submitted here is over."""
        for part, row in zip(self._parts, rows, strict=True):
            part.index_copy_(1, slot, self._here(row))

    def _here(self, row: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return row
        here = torch.empty(row.shape, dtype=torch.uint8, device=self.device)
        for target, source in zip(here, row, strict=True):  # a layer's bytes lie together
            target.copy_(source, non_blocking=True)
        return here


class FullLayerGate:
    """A layer gate of a model whose recurrent layers have no rows: layers have the model's numbers
    for SGLang's pool, and among those with full attention for us."""

    def __init__(self, gate: LayerGate, pool: HybridLinearKVPool) -> None:
        self._gate = gate
        self._numbers = pool.full_attention_layer_id_mapping

    def wait_until(self, layer: int) -> None:
        number = self._numbers.get(layer)
        if number is not None:
            self._gate.wait_until(number)


def gate_of(pool: Any, gate: LayerGate) -> LayerGate | FullLayerGate:
    """What SGLang's `pool` asks before a layer reads."""
    return FullLayerGate(gate, pool) if type(pool) is HybridLinearKVPool else gate


def state_pool(runner: Any) -> StatePool | None:
    """The states of a model runner; None where it has no recurrent layers. Raises
    UnsupportedPool."""
    pool = getattr(runner.req_to_token_pool, "mamba_pool", None)
    return None if pool is None else StatePool(pool)


def _refuse(pool: Any) -> None:
    """Raise UnsupportedPool for a pool of which a state is more than these tensors."""
    if type(pool) is not MambaPool:
        raise UnsupportedPool(f"state pool {type(pool).__name__} is not supported")
    state = pool.mamba_cache
    if pool.enable_linear_replayssm or pool.enable_linear_replayssm_spec:
        raise UnsupportedPool(
            "--enable-linear-replayssm and --enable-linear-replayssm-spec: a part of each state is "
            "in steps that are not in it yet; leave them out"
        )
    if pool._slot_siblings:
        raise UnsupportedPool("the model keeps other state beside that of its recurrent layers")
    if any(not part.is_contiguous() for part in (*state.conv, state.temporal)):
        raise UnsupportedPool("the states of recurrent layers are not contiguous")
