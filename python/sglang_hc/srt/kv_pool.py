"""SGLang's KV pools as rows of bytes, and as the target of a restoration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang_hc.srt.adapters import LayerAdapter


class UnsupportedPool(ValueError):
    """A KV pool whose rows cannot be read and written as bytes."""


class KvPoolRows:
    """Byte rows of each layer of a pool. Implements `transfer`'s DevicePool and RestoreSink."""

    def __init__(self, pool: Any, adapters: Sequence[LayerAdapter] | None) -> None:
        """`adapters` are needed for layers kept as hidden states only."""
        self._pool = pool
        self._adapters = adapters
        if type(pool) is MHATokenToKVPool:
            buffers = [[k, v] for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)]
        elif type(pool) is MLATokenToKVPool:
            buffers = [[kv] for kv in pool.kv_buffer]
        else:
            raise UnsupportedPool(f"KV pool {type(pool).__name__} is not supported")
        if getattr(pool, "use_hnd", False) or any(
            not part.is_contiguous() for layer in buffers for part in layer
        ):
            raise UnsupportedPool("the KV pool's rows are not contiguous")
        self._rows = [
            [part.view(part.shape[0], -1).view(torch.uint8) for part in layer] for layer in buffers
        ]
        self.device: torch.device = buffers[0][0].device

    @property
    def num_layers(self) -> int:
        return len(self._rows)

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of one row of each part; all layers are alike."""
        sizes = {tuple(part.shape[1] for part in layer) for layer in self._rows}
        if len(sizes) != 1:
            raise UnsupportedPool("the KV pool's layers differ in size")
        return sizes.pop()

    def rows(self, layer: int) -> list[torch.Tensor]:
        return self._rows[layer]

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        assert self._adapters is not None
        adapter = self._adapters[layer]
        with torch.no_grad():
            states = hidden.view(adapter.qkv.weight.dtype)
            k, v = adapter.project(states, positions)
            self._pool.set_kv_buffer(adapter.radix, slots, k, v)

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        for target, rows in zip(self._rows[layer], parts, strict=True):
            copy_rows(target, rows, slots)


def copy_rows(target: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Store (n, bytes) uint8 rows at int64 slots of (slots, bytes) uint8, both contiguous.

    A copy by index goes element by element: on a CPU six times faster in words than in bytes.
    """
    if target.shape[1] % 8 == 0 and (rows.data_ptr() | target.data_ptr()) % 8 == 0:
        target, rows = target.view(torch.int64), rows.view(torch.int64)
    target.index_copy_(0, slots, rows)
