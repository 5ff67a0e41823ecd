"""Hidden states to K and V in the pool: by the model's own modules and SGLang's pool write.

Where the package sglang_hc_kernels is installed it has other ways. On a GPU each one that agrees
with this is timed on this model's shapes at start, and the fastest one is used.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_hc.device.autotune import seconds_on
from sglang_hc.device.copy_stream import CopyStream, SideStream
from sglang_hc.forms import StateShape
from sglang_hc.restore.path import RestoreSink
from sglang_hc.restore.side_stream import fastest_side_stream
from sglang_hc.srt.model.families import LayerAdapter

Projection = Callable[[Any, LayerAdapter, int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(pool, adapter, layer, hidden (n, size), positions (n,) int64, slots (n,) int64)."""

logger = logging.getLogger(__name__)

TIMED_ROWS = 4096
"""Most rows of what is timed: what a frame of the restore pass holds of a 7B model."""

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


def installed_kernels() -> Any:
    """The choices of the package of kernels, `sglang_hc_kernels.choice`, or None."""
    try:
        return importlib.import_module("sglang_hc_kernels.choice")
    except ImportError as error:
        if error.name != "sglang_hc_kernels":
            logger.warning("sglang-hc: kernels that do not fit are not used: %s", error)
        return None


def fastest_projection(runner: Any, adapters: list[LayerAdapter], allocator: Any) -> Projection:
    """The fastest way for this model on this GPU. Runs before any request: no slot is in use."""
    context = runner.model_config.context_len
    with unused_slots(allocator, TIMED_ROWS) as slots:
        return projection_for(runner.token_to_kv_pool, adapters, slots, context)


@contextlib.contextmanager
def unused_slots(allocator: Any, rows: int) -> Iterator[torch.Tensor]:
    """Lends (n,) int64 device slots that nobody uses: whole pages, at most `rows`."""
    page = allocator.page_size
    slots = allocator.alloc(min(rows, allocator.available_size()) // page * page)
    try:
        yield slots.to(torch.int64)
    finally:
        allocator.free(slots)


def projection_for(
    pool: Any, adapters: list[LayerAdapter], slots: torch.Tensor, context: int
) -> Projection:
    """The fastest way into a pool on a GPU, and ready to run with any number of rows.

    slots: (n,) int64 device slots that nobody uses; they are written. context: longest sequence.
    """
    kernels = installed_kernels()
    if kernels is None:
        return by_sglang
    chosen: Projection = kernels.fastest_projection(pool, adapters, slots, context)
    return chosen


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
