"""Ways from hidden states to K and V in the pool, and the choice between them at start.

`sglang` runs the model's own modules and SGLang's pool write, one kernel each. Where the package
sglang_hc_kernels is installed and the layers are plain enough, `epilogue` does bias, K norm, RoPE
and the scatter in one kernel behind the library's GEMM, and `fused` the GEMM as well. On a GPU each
way that agrees with the first is timed on this model's shapes, and the fastest one is used.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm

from sglang_hc.device import autotune
from sglang_hc.device.autotune import Seconds, seconds_on
from sglang_hc.device.copy_stream import CopyStream, SideStream
from sglang_hc.device.exactness import relative_error
from sglang_hc.forms import StateShape
from sglang_hc.restore.path import RestoreSink
from sglang_hc.restore.side_stream import fastest_side_stream
from sglang_hc.srt.model.families import LayerAdapter
from sglang_hc.srt.model.startup_checks import TOLERANCE

logger = logging.getLogger(__name__)

Projection = Callable[[Any, LayerAdapter, int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(pool, adapter, layer, hidden (n, size), positions (n,) int64, slots (n,) int64)."""

CHECKED_ROWS = 48
TIMED_ROWS = 4096
"""Rows of the timed projection: what a frame of the restore pass holds of a 7B model."""

SIDE_ROWS = 1024
"""Rows of the restoration that is timed in both streams."""

NEW_ROWS = 256
LAYER_PROJECTIONS = 6
"""New tokens beside it; a layer of a multi-head model is six times its projection to K and V."""


def by_sglang(
    pool: Any, adapter: LayerAdapter, layer: int, hidden: torch.Tensor, positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:  # fmt: skip
    """The model's modules, then SGLang's write into the pool."""
    k, v = adapter.project(hidden, positions)
    pool.set_kv_buffer(adapter.radix, slots, k, v)


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


def installed_kernels() -> Any:
    """The package of kernels, or None."""
    try:
        return importlib.import_module("sglang_hc_kernels")
    except ImportError:
        return None


def projections(kernels: Any, adapters: list[LayerAdapter], context: int) -> dict[str, Projection]:
    """The ways that these layers allow. context: longest sequence; a kernel writes no row whose
    position its table of angles does not have."""
    ways: dict[str, Projection] = {"sglang": by_sglang}
    if kernels is not None and all(_plain(adapter, context) for adapter in adapters):
        ways["epilogue"] = partial(by_epilogue, kernels)
        ways["fused"] = partial(by_fused, kernels)
    return ways


def fastest_projection(runner: Any, adapters: list[LayerAdapter], allocator: Any) -> Projection:
    """The fastest way for this model on this GPU, ready to run with any number of rows. Runs before
    any request: no slot is in use."""
    context, pool = runner.model_config.context_len, runner.token_to_kv_pool
    kernels = installed_kernels()
    ways = projections(kernels, adapters, context)
    warm_rows = () if kernels is None else kernels.WARM_ROWS
    with unused_slots(allocator, TIMED_ROWS) as slots:
        seconds = seconds_on(slots.device)
        return ways[choose(pool, adapters, ways, slots, context, seconds, warm_rows)]


@contextlib.contextmanager
def unused_slots(allocator: Any, rows: int) -> Iterator[torch.Tensor]:
    """Lends (n,) int64 device slots that nobody uses: whole pages, at most `rows`."""
    page = allocator.page_size
    slots = allocator.alloc(min(rows, allocator.available_size()) // page * page)
    try:
        yield slots.to(torch.int64)
    finally:
        allocator.free(slots)


def fastest_stream(
    adapters: list[LayerAdapter],
    allocator: Any,
    copy_stream: CopyStream,
    shape: StateShape,
    sink: RestoreSink,
) -> SideStream | None:
    """Where restorations run on this GPU. Runs before any request, when no slot is in use."""
    weight = adapters[0].qkv.weight
    new = torch.zeros((NEW_ROWS, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    positions = torch.arange(NEW_ROWS, device=weight.device)

    def compute(layer: int) -> None:
        with torch.no_grad():
            for _ in range(LAYER_PROJECTIONS):
                adapters[layer].project(new, positions)

    with unused_slots(allocator, SIDE_ROWS) as slots:
        seconds = seconds_on(slots.device)
        return fastest_side_stream(copy_stream, shape, sink, slots, compute, seconds)


def choose(
    pool: Any, adapters: list[LayerAdapter], ways: Mapping[str, Projection], slots: torch.Tensor,
    context: int, seconds: Seconds, warm_rows: Sequence[int] = (),
) -> str:  # fmt: skip
    """Name of the fastest way that writes in every layer what the first way writes.

    slots: (n,) int64 device slots that nobody uses; they are written. context: longest sequence.
    warm_rows: row counts with which every way is run once, so that nothing is left to compile.
    """
    timed = slots[:TIMED_ROWS]
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

    def work(way: Projection, rows: int = TIMED_ROWS) -> None:
        way(pool, adapters[middle], middle, hidden[:rows], positions[:rows], timed[:rows])

    with torch.no_grad():
        what = "K and V from hidden states"
        return autotune.choose(what, ways, written, _differs, work, seconds)


def _plain(adapter: LayerAdapter, context: int) -> bool:
    """Weights that can be sliced, the norm and the rotation that the kernels know."""
    rotary, norm = adapter.rotary, adapter.k_norm
    if adapter.models_product:
        return False
    if not adapter.sliceable or adapter.head_dim % 2 or adapter.v_head_dim % 2:
        return False
    if norm is not None and type(norm) is not RMSNorm:
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
