"""A restoration that follows reads: each layer is restored when it has come.

The thread that runs the model waits for a layer's reads within the pass. It waits, in all layers
together, no longer than recomputing the blocks would take; then, and when a read fails, the pass
starts again with these blocks recomputed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_hc.store.layer_reads import LayerReads

PAUSE_S = 1e-4
"""Between two looks at the reads."""


class LateLayer(Exception):
    """A layer that a pass waits for is late, or will not come."""


class LayerArrival:
    """The layers of some blocks as a pass waits for them."""

    def __init__(
        self,
        reads: LayerReads,
        poll: Callable[[], None],
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """poll: takes in what has been read. patience: seconds to wait at most."""
        self.reads = reads
        self._poll = poll
        self._patience = patience
        self._clock = clock
        self._pause = pause

    def wait(self, layer: int) -> None:
        """Until this layer of the blocks is in host memory. Raises LateLayer."""
        began = self._clock()
        while not self.reads.has(layer):
            self._poll()
            if self.reads.has(layer):
                break
            if self.reads.is_lost or self._clock() - began >= self._patience:
                raise LateLayer(f"layer {layer} has not come")
            self._pause(PAUSE_S)
        self._patience -= self._clock() - began
