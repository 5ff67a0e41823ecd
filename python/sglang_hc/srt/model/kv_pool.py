"""SGLang's KV pools as rows of bytes, and as the target of a restoration.

There are two ways to gather rows that go to the host. `torch` launches one `index_select` per layer
and part of a row. Where the package sglang_hc_kernels is installed, `kernel` launches one kernel
per part, with a table of the layers' addresses on the device that is made once. On a GPU the second
way is used where it reads the same bytes and is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import gt
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang_hc.capture.direct import DeviceRing, tensors_of
from sglang_hc.device import autotune
from sglang_hc.device.autotune import Seconds, bytes_differ, seconds_on
from sglang_hc.device.gather_scatter import DevicePool, gather, scatter
from sglang_hc.srt.model.columns import Columns, all_columns
from sglang_hc.srt.model.families import LayerAdapter
from sglang_hc.srt.model.projection import (
    Projection,
    by_sglang,
    installed_kernels,
    unused_slots,
)

Gather = Callable[[DevicePool, Sequence[int], torch.Tensor, list[torch.Tensor], int], None]
"""`DevicePool.gather` of the pool that comes first."""

CHECKED_ROWS = 48
TIMED_ROWS = 1024
"""Rows of the timed gathering, as far as a piece of the ring holds them."""

WRITTEN = 59
"""Checked rows have bytes up to this one: finite numbers in every format that a pool may have,
because an attention kernel may multiply by rows that it masks."""


class UnsupportedPool(ValueError):
    """A KV pool whose rows cannot be read and written as bytes."""


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
        latent = type(pool) is MLATokenToKVPool
        kept = columns if latent else all_columns
        self._kept = [kept(part.shape[1]) for part in self._whole_rows[0]]
        """Of each part of a row: heads of K and V are this rank's alone, a latent row is not."""
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
        """One (slots, part bytes) uint8 view per part of a KV row, of what this rank keeps."""
        return self._rows[layer]

    def gather(
        self, layers: Sequence[int], slots: torch.Tensor, targets: list[torch.Tensor], at: int
    ) -> None:
        read = gather if layers[0] >= self.num_layers else self._read
        read(self, layers, slots, targets, at)

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
        if not own:
            for target, rows in zip(self._rows[layer], parts, strict=True):
                scatter(target, slots, rows[:, : target.shape[1]])
            return
        for target, kept, rows in zip(self._whole_rows[layer], self._kept, parts, strict=True):
            scatter(target, slots, kept.whole(rows))

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


def _rows_of(layer: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each part of a layer as (slots, bytes) uint8."""
    return [part.view(part.shape[0], -1).view(torch.uint8) for part in layer]


def _buffers(pool: Any) -> list[list[torch.Tensor]]:
    """Per layer the parts of a pool's rows, (slots, ...). Raises UnsupportedPool."""
    if type(pool) is MHATokenToKVPool:
        buffers = [[k, v] for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)]
    elif type(pool) is MLATokenToKVPool:
        buffers = [[kv] for kv in pool.kv_buffer]
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


class KernelGather:
    """One launch per part of a KV row, for all layers of one pool."""

    def __init__(self, kernels: Any) -> None:
        """kernels: the package sglang_hc_kernels."""
        self._kernels = kernels
        self._tables: dict[tuple[int, ...], list[Any]] = {}

    def __call__(
        self, pool: DevicePool, layers: Sequence[int], slots: torch.Tensor,
        targets: list[torch.Tensor], at: int,
    ) -> None:  # fmt: skip
        """As `DevicePool.gather`. The first call for some layers copies to the device and waits;
        `choose_gather` makes it, before the first request."""
        for table, target in zip(self._tables_of(pool, tuple(layers)), targets, strict=True):
            self._kernels.gather_rows(table, slots, target[:, at:])

    def _tables_of(self, pool: DevicePool, layers: tuple[int, ...]) -> list[Any]:
        """Per part, the addresses of its buffers in these layers."""
        if layers not in self._tables:
            parts = zip(*(pool.rows(layer) for layer in layers), strict=True)
            self._tables[layers] = [self._kernels.PointerTable(part) for part in parts]
        return self._tables[layers]


def gathers(kernels: Any) -> dict[str, Gather]:
    """The ways there are. kernels: None where they are not installed."""
    ways: dict[str, Gather] = {"torch": gather}
    if kernels is not None:
        ways["kernel"] = KernelGather(kernels)
    return ways


def fastest_gather(
    pool: KvPoolRows, layers: Sequence[int], allocator: Any, ring: DeviceRing
) -> Gather:
    """The fastest way for this model on this GPU. Runs before any request, when no slot is in use.

    layers: those whose KV is saved, at least one.
    """
    ways = gathers(installed_kernels())
    with unused_slots(allocator, TIMED_ROWS) as slots:
        return ways[choose_gather(pool, layers, ways, slots, ring, seconds_on(pool.device))]


def choose_gather(
    pool: KvPoolRows, layers: Sequence[int], ways: Mapping[str, Gather], slots: torch.Tensor,
    ring: DeviceRing, seconds: Seconds,
) -> str:  # fmt: skip
    """Name of the fastest way that reads what the first way reads, in pieces as they are served.

    slots: (n,) int64 device slots that nobody uses; they are written.
    """
    slots = slots[: ring.rows(len(layers) * sum(pool.part_bytes))]
    checked = slots[:CHECKED_ROWS]
    _fill(pool, layers, checked)

    def targets(rows: int) -> list[torch.Tensor]:
        """Where a piece of `rows` rows lies in the ring."""
        return tensors_of(ring.memory, [(len(layers), rows, width) for width in pool.part_bytes])

    check, timed = targets(len(checked)), targets(len(slots))

    def read(way: Gather) -> torch.Tensor:
        """What one way reads, as bytes, into memory that held something else before."""
        for target in check:
            target.fill_(WRITTEN + 1)
        # The first row alone, then the others behind it: a piece need not begin where its memory
        # does.
        way(pool, layers, checked[:1], check, 0)
        way(pool, layers, checked[1:], check, 1)
        return torch.cat([target.flatten() for target in check])

    def work(way: Gather) -> None:
        way(pool, layers, slots, timed, 0)

    return autotune.choose("KV rows from the pool", ways, read, bytes_differ, work, seconds)


def _fill(pool: KvPoolRows, layers: Sequence[int], slots: torch.Tensor) -> None:
    """Bytes that differ from row to row and from layer to layer."""
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        for part in pool.rows(layer):
            shape = slots.numel(), part.shape[1]
            values = torch.randint(0, WRITTEN + 1, shape, generator=generator, dtype=torch.uint8)
            part[slots] = values.to(part.device)
