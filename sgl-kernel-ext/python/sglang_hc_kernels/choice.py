"""What the server asks: the fastest ways to project hidden states and to gather KV rows, kernels
included. Each way must first agree with the server's own.

`epilogue` does bias, K norm, RoPE and the scatter in one kernel behind the library's GEMM, `fused`
the GEMM as well, where the layers are plain enough. `kernel` gathers the rows of all layers with
one launch for each part of a row. Only this module imports sglang_hc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from sglang_hc.capture.direct import DeviceRing, tensors_of
from sglang_hc.device import autotune
from sglang_hc.device.autotune import Seconds, bytes_differ, seconds_on
from sglang_hc.device.exactness import relative_error
from sglang_hc.device.gather_scatter import DevicePool, gather
from sglang_hc.srt.model.families import LayerAdapter
from sglang_hc.srt.model.kv_pool import Gather, KvPoolRows
from sglang_hc.srt.model.projection import Projection, by_sglang
from sglang_hc.srt.model.startup_checks import TOLERANCE

import sglang_hc_kernels

CHECKED_ROWS = 48
PROJECTED_ROWS = 4096
"""Rows of the timed projection: what a frame of the restore pass holds of a 7B model."""

GATHERED_ROWS = 1024
"""Rows of the timed gathering, as far as a piece of the ring holds them."""

WRITTEN = 59
"""Checked KV rows have bytes up to this one: finite numbers in every format that a pool may have,
because an attention kernel may multiply by rows that it masks."""


# -- hidden states to K and V --------------------------------------------------------------------


def by_epilogue(
    kernels: Any, pool: Any, adapter: LayerAdapter, layer: int, hidden: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor,
) -> None:  # fmt: skip
    """The library's GEMM with bias, then one kernel for the rest."""
    weight, bias = adapter.kv_weight()
    kv = torch.nn.functional.linear(hidden, weight, bias)
    kernels.kv_epilogue(
        kv, positions, slots, pool.k_buffer[layer], pool.v_buffer[layer],
        epilogue=_epilogue(kernels, adapter, None),
    )  # fmt: skip


def by_fused(
    kernels: Any, pool: Any, adapter: LayerAdapter, layer: int, hidden: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor,
) -> None:  # fmt: skip
    """One kernel for everything."""
    weight, bias = adapter.kv_weight()
    kernels.project_kv(
        hidden, weight, positions, slots, pool.k_buffer[layer], pool.v_buffer[layer],
        epilogue=_epilogue(kernels, adapter, bias),
    )  # fmt: skip


def projections(
    adapters: Sequence[LayerAdapter], context: int, kernels: Any = sglang_hc_kernels
) -> dict[str, Projection]:
    """The ways that these layers allow. context: longest sequence; a kernel writes no row whose
    position its table of angles does not have."""
    ways: dict[str, Projection] = {"sglang": by_sglang}
    if all(_plain(adapter, context) for adapter in adapters):
        ways["epilogue"] = partial(by_epilogue, kernels)
        ways["fused"] = partial(by_fused, kernels)
    return ways


def fastest_projection(
    pool: Any, adapters: list[LayerAdapter], slots: torch.Tensor, context: int
) -> Projection:
    """The fastest way into a pool on a GPU, and ready to run with any number of rows.

    slots: (n,) int64 device slots that nobody uses; they are written. context: longest sequence.
    """
    ways, seconds = projections(adapters, context), seconds_on(slots.device)
    rows = sglang_hc_kernels.WARM_ROWS
    return ways[choose_projection(pool, adapters, ways, slots, context, seconds, rows)]


def choose_projection(
    pool: Any, adapters: list[LayerAdapter], ways: Mapping[str, Projection], slots: torch.Tensor,
    context: int, seconds: Seconds, warm_rows: Sequence[int] = (),
) -> str:  # fmt: skip
    """Name of the fastest way that writes in every layer what the first way writes.

    warm_rows: row counts with which every way is run once, so that nothing is left to compile.
    """
    timed = slots[:PROJECTED_ROWS]
    middle = len(adapters) // 2
    hidden, positions = _sample(adapters[middle], timed, context)

    def written(way: Projection) -> torch.Tensor:
        """(layers, rows, K and V) of one way, on rows that held something else before."""
        for rows in warm_rows:  # here, so that a way that fails with one of them is left out
            work(way, rows)
        found, checked = [], slots[:CHECKED_ROWS]
        for layer, adapter in enumerate(adapters):
            buffers = pool.k_buffer[layer], pool.v_buffer[layer]
            for buffer in buffers:
                buffer[checked] = 0
            way(pool, adapter, layer, *_sample(adapter, checked, context), checked)
            parts = [buffer[checked].flatten(1).float() for buffer in buffers]
            found.append(torch.cat(parts, dim=1).to(pool.k_buffer[0].dtype))
        return torch.stack(found)

    def work(way: Projection, rows: int = PROJECTED_ROWS) -> None:
        way(pool, adapters[middle], middle, hidden[:rows], positions[:rows], timed[:rows])

    with torch.no_grad():
        what = "K and V from hidden states"
        return autotune.choose(what, ways, work, seconds, written, _differs)


def _plain(adapter: LayerAdapter, context: int) -> bool:
    """Weights that can be sliced, the norm and the rotation that the kernels know."""
    rotary = adapter.rotary
    if adapter.models_product or adapter.has_other_norm:
        return False
    if not adapter.sliceable or adapter.head_dim % 2 or adapter.v_head_dim % 2:
        return False
    if rotary is None:
        return True
    cache = getattr(rotary, "cos_sin_cache", None)
    return (
        cache is not None
        and cache.shape[0] >= context
        and cache.shape[1] == getattr(rotary, "rotary_dim", None)
        and hasattr(rotary, "is_neox_style")
    )


def _epilogue(kernels: Any, adapter: LayerAdapter, bias: torch.Tensor | None) -> Any:
    """Looked up at each call, as weights are: both may be replaced while the server runs."""
    rotary, norm = adapter.rotary, adapter.k_norm
    return kernels.Epilogue(
        bias=bias,
        k_norm=None if norm is None else kernels.KNorm(norm.weight, norm.variance_epsilon),
        rotary=None
        if rotary is None
        else kernels.Rotary(rotary.cos_sin_cache, interleaved=not rotary.is_neox_style),
    )


def _sample(
    adapter: LayerAdapter, slots: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and positions from all over the context."""
    weight = adapter.qkv.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((slots.numel(), weight.shape[1]), generator=generator)
    positions = torch.arange(slots.numel(), dtype=torch.int64, device=slots.device) * 37 % context
    return hidden.to(weight.device, weight.dtype), positions


def _differs(first: torch.Tensor, other: torch.Tensor) -> str | None:
    """Per layer, against its largest value."""
    for layer, (a, b) in enumerate(zip(first, other, strict=True)):
        error = relative_error(a, b)
        if not error <= TOLERANCE[first.dtype]:
            return f"layer {layer} differs by {error:.2e}"
    return None


# -- KV rows from the pool -----------------------------------------------------------------------


class KernelGather:
    """One launch per part of a KV row, for all layers of one pool."""

    def __init__(self, kernels: Any = sglang_hc_kernels) -> None:
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


def fastest_gather(
    pool: KvPoolRows, layers: Sequence[int], slots: torch.Tensor, ring: DeviceRing
) -> Gather:
    """The fastest way for this model on this GPU. Runs before any request.

    layers: those whose KV is saved, at least one. slots: as for `choose_gather`.
    """
    ways: dict[str, Gather] = {"torch": gather, "kernel": KernelGather()}
    return ways[choose_gather(pool, layers, ways, slots, ring, seconds_on(pool.device))]


def choose_gather(
    pool: KvPoolRows, layers: Sequence[int], ways: Mapping[str, Gather], slots: torch.Tensor,
    ring: DeviceRing, seconds: Seconds,
) -> str:  # fmt: skip
    """Name of the fastest way that reads what the first way reads, in pieces as they are served.

    slots: (n,) int64 device slots that nobody uses; they are written.
    """
    slots = slots[: min(GATHERED_ROWS, ring.rows(len(layers) * sum(pool.part_bytes)))]
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

    return autotune.choose("KV rows from the pool", ways, work, seconds, read, bytes_differ)


def _fill(pool: KvPoolRows, layers: Sequence[int], slots: torch.Tensor) -> None:
    """Bytes that differ from row to row and from layer to layer."""
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        for part in pool.rows(layer):
            shape = slots.numel(), part.shape[1]
            values = torch.randint(0, WRITTEN + 1, shape, generator=generator, dtype=torch.uint8)
            part[slots] = values.to(part.device)
