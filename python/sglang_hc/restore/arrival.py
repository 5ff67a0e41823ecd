"""A restoration that follows reads: each layer is restored when it has come.

The thread that runs the model waits for a layer's reads within the pass. It waits, in all layers
together, no longer than recomputing the blocks would take; then, and when a read fails, the pass
starts again with these blocks recomputed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.restore.path import LateLayer, Restoration
from sglang_hc.store.layer_reads import LayerReads

PAUSE_S = 1e-4
"""Between two looks at the reads."""


class LayerArrival:
    """The layers of some blocks as a pass waits for them. Implements `restore.path.Arrival`."""

    def __init__(
        self,
        reads: LayerReads,
        poll: Callable[[], None],
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """poll: takes in what has been read. patience: seconds to wait at most."""
        self._reads = reads
        self._poll = poll
        self._patience = patience
        self._clock = clock
        self._pause = pause

    def has(self, layer: int) -> bool:
        return self._reads.has(layer)

    def wait(self, layer: int) -> None:
        began = self._clock()
        while not self._reads.has(layer):
            self._poll()
            if self._reads.has(layer):
                break
            if self._reads.is_lost or self._clock() - began >= self._patience:
                raise LateLayer(f"layer {layer} has not come")
            self._pause(PAUSE_S)
        self._patience -= self._clock() - began

    def has_all(self, slot: int) -> bool:
        return self._reads.has_all(slot)


def without_waiting(restorations: Sequence[Restoration], layers: int) -> list[Restoration]:
    """The same restorations, of what is in host memory. Blocks that are not have all `layers`
    layers recomputed. Each attends to those before it."""
    return [part for restoration in restorations for part in _parts(restoration, layers)]


def _parts(whole: Restoration, layers: int) -> list[Restoration]:
    arrival = whole.arrival
    if arrival is None:
        return [whole]
    assert whole.prefix_slots is not None
    blocks = range(whole.start // BLOCK_TOKENS, -(-whole.stop // BLOCK_TOKENS))
    parts = []
    for here, run in groupby(blocks, lambda block: arrival.has_all(whole.nodes[block].slot)):
        numbers = list(run)
        start = max(whole.start, numbers[0] * BLOCK_TOKENS)
        stop = min(whole.stop, (numbers[-1] + 1) * BLOCK_TOKENS)
        first, last = start - whole.start, stop - whole.start
        part = replace(
            whole,
            start=start,
            stop=stop,
            device_slots=whole.device_slots[first:last],
            recompute=whole.recompute if here else layers,
            prefix_slots=torch.cat([whole.prefix_slots, whole.device_slots[:first]]),
            arrival=None,
        )
        parts.append(part)
    return parts
