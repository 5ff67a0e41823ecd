"""SGLang's KV pools as rows of bytes, and as the target of a restoration.

Rows that go to the host are gathered by one `index_select` per layer and part of a row, on a GPU by
a kernel of the package sglang_hc_kernels where that is installed and was faster at start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import gt
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_hc.capture.direct import DeviceRing
from sglang_hc.device.gather_scatter import DevicePool, Places, gather, scatter, select
from sglang_hc.srt.model.columns import Columns, all_columns
from sglang_hc.srt.model.families import LayerAdapter
from sglang_hc.srt.model.projection import (
    TIMED_ROWS,
    Projection,
    by_sglang,
    installed_kernels,
    unused_slots,
)
from sglang_hc.srt.model.sparse_index import index_buffers, index_places, unsupported

Gather = Callable[[DevicePool, Sequence[int], torch.Tensor, list[torch.Tensor], int], None]
"""`DevicePool.gather` of the pool that comes first."""


class UnsupportedPool(ValueError):
    """A KV pool whose rows cannot be read and written as bytes."""


class Values(NamedTuple):
    """rows: (n, width) numbers. dtype: by which they are rounded."""

    rows: torch.Tensor
    dtype: torch.dtype


class KvPoolRows:
    """Byte rows of each layer of a pool, as DevicePool and RestoreSink. The layers of a draft
    model's pool, which has the same slots, are numbered behind the model's own."""

    def __init__(
        self,
        pool: Any,
        adapters: Sequence[LayerAdapter] | None,
        project: Projection = by_sglang,
        read: Gather = gather,
        columns: Callable[[int], Columns] = all_columns,
        draft: Any = None,
    ) -> None:
        """adapters: needed for layers kept as hidden states only. project: how K and V come from
        hidden states. read: how rows of many layers are gathered. columns: what this rank keeps of
        rows that all ranks have, by their width. draft: the pool of a draft model, None where there
        is none. Raises UnsupportedPool."""
        self.pool = pool
        self.adapters = adapters
        self._project = project
        self._read = read
        self._columns = columns
        buffers = _buffers(pool)
        self.num_layers = len(buffers)
        """Of the model; draft layers follow."""
        self._whole_rows = [_rows_of(layer) for layer in buffers]
        latent = isinstance(pool, MLATokenToKVPool)
        kept = columns if latent else all_columns
        self._kept = [kept(part.shape[1]) for part in self._whole_rows[0]]
        """Of each part of a row: heads of K and V are this rank's alone, a latent row and its index
        are not."""
        self._places = [Places()] * len(buffers[0])
        if isinstance(pool, DSATokenToKVPool):
            self._places = [Places(), *index_places(pool)]
        self.interleaved = any(places != Places() for places in self._places)
        """Whether rows of a part lie elsewhere than their slots, so that only this class finds
        them."""
        self._rows = [
            [kept.of(part) for kept, part in zip(self._kept, layer, strict=True)]
            for layer in self._whole_rows
        ]
        self.device: torch.device = buffers[0][0].device
        sizes = {tuple(part.shape[1] for part in layer) for layer in self._rows}
        if len(sizes) != 1:
            raise UnsupportedPool("the KV pool's layers differ in size")
        self.part_bytes: tuple[int, ...] = sizes.pop()
        """Bytes that are kept of one row of each part; all layers of the model are alike, and rows
        of draft layers have at most as many."""
        self._rows += [_rows_of(layer) for layer in _buffers(draft)] if draft is not None else []
        for layer in self._rows[self.num_layers :]:
            widths = [part.shape[1] for part in layer]
            if len(widths) != len(self.part_bytes) or any(map(gt, widths, self.part_bytes)):
                raise UnsupportedPool(
                    "--speculative-draft-model-path: the draft model keeps more KV for a token and "
                    "layer than the model, or of another kind; use a smaller draft model"
                )

    def rows(self, layer: int) -> list[torch.Tensor]:
        """One (slots, part bytes) uint8 view per part of a KV row, of what this rank keeps. Not for
        an `interleaved` pool."""
        assert not self.interleaved, "rows of this pool lie elsewhere than their slots"
        return self._rows[layer]

    def gather(
        self, layers: Sequence[int], slots: torch.Tensor, targets: list[torch.Tensor], at: int
    ) -> None:
        if not self.interleaved:
            read = gather if layers[0] >= self.num_layers else self._read
            read(self, layers, slots, targets, at)
            return
        for part, (target, places) in enumerate(zip(targets, self._places, strict=True)):
            rows = places.of(slots)
            for index, layer in enumerate(layers):
                source = self._rows[layer][part]
                out = target[index, at : at + slots.numel(), : source.shape[1]]
                if len(source):
                    select(source, rows, out)
                else:  # nobody reads it; nor shall anybody find there what others left
                    out.zero_()

    def values(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> list[Values]:
        """What rows (n, part bytes) uint8 stand for; a key of an index with its scale. dtype: of
        the pool's elements."""
        if not isinstance(self.pool, DSATokenToKVPool):
            return [Values(part.contiguous().view(dtype), dtype) for part in parts]
        latents, keys, scales = (part.contiguous() for part in parts)
        eight = keys.view(torch.float8_e4m3fn)
        rows = eight.float() * scales.view(torch.float32)
        return [Values(latents.view(dtype), dtype), Values(rows, eight.dtype)]

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        assert self.adapters is not None
        adapter = self.adapters[layer]
        with torch.no_grad():
            weight = adapter.qkv.weight
            states = self._columns(weight.shape[1]).whole(hidden.view(weight.dtype))
            self._project(self.pool, adapter, layer, states, positions, slots)

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        own = layer < self.num_layers
        if own and self.device.type == "cuda" and isinstance(self.pool, MHATokenToKVPool):
            self.write_kv_by_sglang(layer, parts, slots)
            return
        targets = self._whole_rows[layer] if own else self._rows[layer]
        for target, kept, places, rows in zip(
            targets, self._kept, self._places, parts, strict=True
        ):
            if len(target):  # on all ranks alike: they gather their parts of a row
                whole = kept.whole(rows) if own else rows[:, : target.shape[1]]
                scatter(target, places.of(slots), whole)

    def write_kv_by_sglang(
        self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor
    ) -> None:
        """`write_kv` by the pool's own kernel: K and V in one launch. For multi-head pools.

        The rows are handed over in the pool's dtype, so that their bytes stay.
        """
        pool = self.pool
        buffers = pool.k_buffer[layer], pool.v_buffer[layer]
        k, v = (
            rows.view(pool.dtype).view(rows.shape[0], *buffer.shape[1:])
            for rows, buffer in zip(parts, buffers, strict=True)
        )
        pool.set_kv_buffer(None, slots, k, v, layer_id_override=pool.start_layer + layer)


def draft_pool(pool: Any, eagle: bool) -> Any:
    """The pool of a draft model's layers, all of which have full attention, of SGLang's `pool`;
    None without one. eagle: it is a head, which SGLang may give a pool as the model has, with the
    head's layer alone. Raises UnsupportedPool for one that keeps more than a block has for it."""
    if eagle and type(pool) is HybridLinearKVPool:
        return pool.full_kv_pool
    if type(pool) in (SWAKVPool, HybridLinearKVPool):
        raise UnsupportedPool(
            "--speculative-draft-model-path: layers of the draft model have sliding windows or are "
            "recurrent, and of a draft model nothing is kept at ends; use another one"
        )
    return pool


def _rows_of(layer: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each part of a layer as (slots, bytes) uint8."""
    return [part.flatten(1).view(torch.uint8) for part in layer]


def _buffers(pool: Any) -> list[list[torch.Tensor]]:
    """Per layer the parts of a pool's rows, (slots, ...). Raises UnsupportedPool."""
    if type(pool) is MHATokenToKVPool:
        buffers = [[k, v] for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)]
    elif type(pool) is MLATokenToKVPool:
        buffers = [[kv] for kv in pool.kv_buffer]
    elif type(pool) is DSATokenToKVPool:
        reason = unsupported(pool)
        if reason is not None:
            raise UnsupportedPool(reason)
        index = index_buffers(pool)
        buffers = [[kv, *parts] for kv, parts in zip(pool.kv_buffer, index, strict=True)]
    else:
        raise UnsupportedPool(f"KV pool {type(pool).__name__} is not supported")
    if getattr(pool, "is_quantized_kv_cache", False):
        raise UnsupportedPool(
            "--kv-cache-dtype fp4_e2m1: the scales of the KV pool's rows lie outside of them, so "
            "rows alone cannot come back; use another type"
        )
    if getattr(pool, "use_hnd", False) or any(
        not part.is_contiguous() for layer in buffers for part in layer
    ):
        raise UnsupportedPool("the KV pool's rows are not contiguous")
    return buffers


def fastest_gather(
    pool: KvPoolRows, layers: Sequence[int], allocator: Any, ring: DeviceRing
) -> Gather:
    """The fastest way to gather rows on this GPU. Runs before any request, when no slot is in use.

    layers: those whose KV is saved, at least one.
    """
    kernels = installed_kernels()
    if kernels is None or pool.interleaved:
        return gather
    with unused_slots(allocator, TIMED_ROWS) as slots:
        chosen: Gather = kernels.fastest_gather(pool, layers, slots, ring)
        return chosen
