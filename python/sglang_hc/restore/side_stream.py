"""Should restorations run in the compute stream or beside it? Measured at start on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sglang_hc.device.autotune import Seconds, choose
from sglang_hc.device.copy_stream import CopyStream, SideStream
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.restore.path import Restoration, RestorePath, RestoreSink
from sglang_hc.restore.probe import block_in, scratch_pool
from sglang_hc.restore.restore_pass import SIDE_LAYERS, RestorePass
from sglang_hc.restore.staging import StagingRing

LAYERS = 2 * SIDE_LAYERS
"""Layers of the timed restoration: twice as many as a side stream gets ahead, so that both ways are
timed as they are used."""


def fastest_side_stream(
    copy_stream: CopyStream,
    shape: StateShape,
    sink: RestoreSink,
    slots: torch.Tensor,
    compute: Callable[[int], None],
    seconds: Seconds,
) -> SideStream | None:
    """A stream beside the compute stream, if a restoration from hidden states ends sooner there.

    Beside the compute stream a layer is projected while the new tokens are still in earlier layers;
    in the compute stream the two never compete for the device. None: the compute stream is faster,
    or the copy stream has no side stream. slots: (n,) int64 device slots that nobody uses; they are
    written. compute(layer): submits about as much work as a layer has for a request's new tokens.
    """
    side = copy_stream.side_stream()
    blocks = slots.numel() // BLOCK_TOKENS
    if side is None or not blocks:
        return None
    layers = min(LAYERS, shape.num_layers)
    layout = BlockLayout(LayerPlan(0, layers, 0), replace(shape, num_layers=layers))
    pool = scratch_pool(layout, blocks, slots.device)
    ring = StagingRing.sized_for(shape, slots.device, copy_stream)
    tokens = blocks * BLOCK_TOKENS
    restoration = Restoration(tuple(map(block_in, range(blocks))), 0, tokens, slots[:tokens])

    def run(way: SideStream | None) -> None:
        path = RestorePath(pool, sink, ring, side_stream=way)
        restore = RestorePass(path, [restoration])
        for layer in range(layers):
            restore.wait(layer)
            compute(layer)
        restore.finish()

    ways = {"the compute stream": None, "a stream beside it": side}
    return ways[choose("restoration", ways, run, seconds)]
