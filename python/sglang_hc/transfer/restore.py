"""Restore: blocks of the host tier become KV in the device pool, layer by layer, during a forward.

A `Restoration` is one request's span; a `RestorePass` is what one forward pass has to wait for: all
restorations queued since the last one, run as one batch. Layer i's attention calls `wait(i)`, which
fences on layer i's copies only, rebuilds or scatters its K/V, and enqueues the copies of a layer
further on, so copies run ahead of the compute by `AHEAD` layers (HCache section 4.1).

A restoration may leave its first layers to a `Recomputer`, which runs the model's own layers over
the history tokens; it does so before any `wait`, while the first copies are under way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, Form
from sglang_hc.store.host_pool import HostPool
from sglang_hc.transfer.lanes import Lane, Mark
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import unpack_tokens

AHEAD = 2
"""Layers whose copies may be under way beside the one being computed: double buffering."""


class RestoreSink(Protocol):
    """The device's KV pool as the target of a restoration."""

    def rows(self, layer: int) -> list[torch.Tensor]:
        """One (slots, part bytes) uint8 view per part of a KV row."""

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Project (n, hidden_bytes) uint8 rows to K/V at int64 positions and store them at slots.

        Bias, K norm and position embedding included. Must not change its inputs.
        """


class HostSpan(NamedTuple):
    """`rows` consecutive rows of one host slot."""

    slot: int
    row: int
    rows: int


@dataclass(eq=False)
class Restoration:
    """Tokens [start, stop) of one path, to be written to `device_slots` ((stop - start,) int64).

    recompute: the layers below this one are recomputed, not loaded. At least the layer plan's
    recompute count; above it, layers that are stored are recomputed all the same.
    prefix_slots: (start,) int64 device slots of the tokens before; recomputed layers attend to
    them. May be left out where nothing is recomputed.
    """

    nodes: tuple[BlockNode, ...]
    start: int
    stop: int
    device_slots: torch.Tensor
    recompute: int = 0
    prefix_slots: torch.Tensor | None = None

    def spans(self) -> list[HostSpan]:
        spans = []
        position = self.start
        while position < self.stop:
            block, row = divmod(position, BLOCK_TOKENS)
            rows = min(BLOCK_TOKENS - row, self.stop - position)
            spans.append(HostSpan(self.nodes[block].slot, row, rows))
            position += rows
        return spans

    def tokens(self) -> npt.NDArray[np.int64]:
        """(stop - start,) token ids."""
        first = self.start // BLOCK_TOKENS
        packed = b"".join(node.tokens for node in self.nodes[first:])
        skip = first * BLOCK_TOKENS
        return unpack_tokens(packed)[self.start - skip : self.stop - skip]


class Recomputer(Protocol):
    """The model's own first layers."""

    def run(self, restoration: Restoration) -> None:
        """Write K/V of layers [0, restoration.recompute) of its tokens to its device slots.

        Submits compute work. The prefix is valid in the layers it reads once the layer gate was
        asked for them. Raises what a forward pass may raise; then nothing may be served.
        """


class RestorePass:
    """Restorations of one forward pass. Each layer's work happens once, at its first `wait`.

    Belongs to the thread that runs the model, on the compute stream. Restorations that load a layer
    are the first ones in order of `recompute`, so each layer's rows are a prefix of all rows.
    """

    def __init__(
        self,
        layout: BlockLayout,
        pool: HostPool,
        sink: RestoreSink,
        lane: Lane,
        restorations: Sequence[Restoration],
        device: torch.device,
        recomputer: Recomputer | None = None,
    ) -> None:
        """`recomputer` may be left out where no restoration recomputes."""
        self.restorations = tuple(restorations)
        self._layout = layout
        self._sink = sink
        self._lane = lane
        self._recomputer = recomputer
        ordered = sorted(restorations, key=lambda r: r.recompute)
        self._starts = [r.recompute for r in ordered]
        self._spans: list[HostSpan] = []
        self._ends = [(0, 0)]
        """(spans, tokens) of the first so many restorations in this order."""
        for r in ordered:
            self._spans += r.spans()
            self._ends.append((len(self._spans), self._ends[-1][1] + r.stop - r.start))
        self._slots = torch.cat([r.device_slots for r in ordered])
        self._positions = torch.cat(
            [torch.arange(r.start, r.stop, dtype=torch.int64) for r in ordered]
        ).to(device)
        self._hidden = torch.from_numpy(pool.hidden)
        self._kv = [torch.from_numpy(part) for part in pool.kv]
        self._device = device
        self._marks: dict[int, tuple[Mark, list[torch.Tensor]]] = {}
        plan = layout.plan
        stored = [*plan.hidden_layers, *plan.kv_layers]
        self._todo = [layer for layer in stored if self._loaded(layer)[1]]
        self._next_copy = 0
        self._done: set[int] = set()
        lane.after_compute()
        for _ in range(AHEAD):
            self._enqueue()

    def recompute(self) -> None:
        """Submit the recomputation of the layers that are not loaded, in the order of admission.

        A restoration may attend to the slots of one before it, so that one's loaded layers are
        waited for through the gate meanwhile.
        """
        for restoration in self.restorations:
            if restoration.recompute:
                assert self._recomputer is not None
                self._recomputer.run(restoration)

    def wait(self, layer: int) -> None:
        """Make layer `layer`'s loaded K/V valid for compute work submitted after."""
        tokens = self._loaded(layer)[1]
        if layer in self._done or not tokens:
            return
        while layer not in self._marks:  # layers asked for out of order
            self._enqueue()
        mark, staged = self._marks.pop(layer)
        self._lane.before_compute(mark)
        if self._layout.plan.form(layer) is Form.HIDDEN:
            positions, slots = self._positions[:tokens], self._slots[:tokens]
            self._sink.write_hidden(layer, staged[0], positions, slots)
        else:
            for target, rows in zip(self._sink.rows(layer), staged, strict=True):
                target.index_copy_(0, self._slots[:tokens], rows)
        self._done.add(layer)
        self._lane.after_compute()
        self._enqueue()

    def finish(self) -> None:
        """Do what no attention asked for, so that the slots are valid whatever was run."""
        for layer in self._todo:
            self.wait(layer)

    def _loaded(self, layer: int) -> tuple[int, int]:
        """How many of the spans and of the tokens this layer is loaded for."""
        return self._ends[bisect_right(self._starts, layer)]

    def _enqueue(self) -> None:
        if self._next_copy == len(self._todo):
            return
        layer = self._todo[self._next_copy]
        self._next_copy += 1
        plan = self._layout.plan
        if plan.form(layer) is Form.HIDDEN:
            sources = [self._hidden[:, layer - plan.recompute]]
        else:
            index = layer - plan.recompute - plan.hidden
            sources = [part[:, index] for part in self._kv]
        spans, tokens = self._loaded(layer)
        staged = []
        for source in sources:
            target = torch.empty((tokens, source.shape[-1]), dtype=torch.uint8, device=self._device)
            at = 0
            for slot, row, rows in self._spans[:spans]:
                self._lane.copy(target[at : at + rows], source[slot, row : row + rows])
                at += rows
            staged.append(target)
        self._marks[layer] = (self._lane.mark(), staged)


class LayerGate:
    """What the KV pool asks before a layer's attention reads: SGLang's layer-transfer counter.

    The consumer index of a batch names the pass it waits for; it sticks to the batch, so an index
    whose pass is over must cost nothing.
    """

    def __init__(self) -> None:
        self._passes: dict[int, RestorePass] = {}
        self._current: RestorePass | None = None
        self._produced = 0
        self.current = -1
        """Consumer index of the running batch."""

    def produce(self, restore: RestorePass) -> int:
        """Register a pass; returns the consumer index of the batch that waits for it."""
        self._produced += 1
        self._passes[self._produced] = restore
        return self._produced

    def recompute(self, index: int) -> None:
        """Run the recomputed layers of a pass; what they attend to is waited for as usual."""
        before = self.current
        self.set_consumer(index)
        try:
            self._passes[index].recompute()
        finally:
            self.set_consumer(before)

    def set_consumer(self, index: int) -> None:
        self.current = index
        self._current = self._passes.get(index)

    def wait_until(self, layer: int) -> None:
        """Called with the layer's index within this rank's pool."""
        if self._current is not None:
            self._current.wait(layer)

    def finish(self) -> tuple[Restoration, ...]:
        """The forward pass is over: complete its restorations and forget the pass."""
        current, self._current = self._current, None
        if current is None:
            return ()
        current.finish()
        del self._passes[self.current]
        return current.restorations
