"""Restore: blocks of the host tier become KV in the device pool, layer by layer, during a forward.

A `Restoration` is the span of one request. A `RestorePass` holds all restorations that were queued
since the last pass; one forward pass waits for them, and they run as one batch. A layer's rows pass
in pieces through the frames of a ring (`staging.py`). Layer i's attention calls `wait(i)`. For each
piece up to that layer this waits for the piece's own copies, projects or scatters its K/V, and
enqueues the copies of a later piece. So copies run ahead of the compute by as much as the ring
holds (HCache section 4.1), across layers and within one.

A restoration may leave its first layers to a `Recomputer`, which runs the model's own layers over
the history tokens. This happens before any `wait`, while the first copies are under way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from sglang_hc.forms import Form
from sglang_hc.policy.copy_order import merged
from sglang_hc.restore.cost_observer import CostObserver, PassObserver
from sglang_hc.restore.path import Restoration, RestorePath
from sglang_hc.restore.staging import (
    LayerSource,
    Piece,
    carve,
    copy_piece,
    cut,
)
from sglang_hc.store.scatter_queue import Event

SIDE_LAYERS = 4
"""How many layers are submitted beside the compute stream ahead of the layer that is waited for. If
it were all of them, the batch would start only after the whole restoration was submitted."""


class _Load(NamedTuple):
    """Rows [piece.first, piece.first + piece.rows) of one layer."""

    layer: int
    piece: Piece


class _Staged(NamedTuple):
    """A piece of one layer whose copies are enqueued; `done` gives its frame back."""

    layer: int
    first: int
    parts: list[torch.Tensor]
    event: Event
    done: Callable[[], None]


class RestorePass:
    """Restorations of one forward pass. Each layer's work happens once, at its first `wait`.

    Belongs to the thread that runs the model, on the compute stream. The restorations are sorted by
    `recompute`, so those that load a layer come first, and its rows are a prefix of all rows.
    """

    def __init__(
        self,
        path: RestorePath,
        restorations: Sequence[Restoration],
        kv_per_hidden: float = 0.0,
        observer: CostObserver | None = None,
    ) -> None:
        """kv_per_hidden: KV layers that are copied between two HIDDEN layers (see
        `policy.copy_order`). observer: sees what the copies and projections take."""
        self._observer = PassObserver(observer)
        self.restorations = tuple(restorations)
        self._layout = path.pool.layout
        self._sink = path.sink
        self._copy_stream = path.copy_stream
        self._staging = path.staging
        self._recomputer = path.recomputer
        self._rotation = path.rotation
        self._ends = path.ends
        self._source = LayerSource(path.pool, None if path.ends is None else path.ends.pool)
        self._in_turn = path.in_turn
        self._ordered = sorted(restorations, key=lambda r: r.recompute)
        self._slots = torch.cat([r.device_slots for r in self._ordered])
        device = self._slots.device
        self._positions = torch.cat(
            [torch.arange(r.start, r.stop, dtype=torch.int64, device=device) for r in self._ordered]
        )
        self._windows = [r.window for r in self._ordered if r.window is not None]
        """Of restorations whose ends have any rows to bring back."""
        own = [window.device_slots for window in self._windows]
        self._window_slots = torch.cat(own) if own else self._slots[:0]
        self._moved_from = _moved_from(self._ordered, self._positions)
        self._todo = deque(self._in_order(list(self._loads()), kv_per_hidden))
        self._open = Counter(load.layer for load in self._todo)
        self._staged: deque[_Staged] = deque()
        self._side_stream = path.side_stream
        self._before_side = path.copy_stream.computed() if path.side_stream is not None else None
        """A point for which the side stream waits before it writes: the batch that runs now may
        still use the slots for the request that had them before. None once it waits for it."""
        self._beside: dict[int, Event] = {}
        """Layers that are submitted beside the compute stream, and when their K/V are valid."""
        self._staging.claim(self.finish)
        try:
            self._run_ahead()
            self._submit_beside(min(self._open, default=0))
        except Exception:
            self.abandon()
            raise

    def recompute(self) -> None:
        """Submit the recomputation of the layers that are not loaded, in the order of admission.

        A restoration may attend to the slots of an earlier one. It waits for the loaded layers of
        that one through the gate.
        """
        for restoration in self.restorations:
            if restoration.recompute:
                assert self._recomputer is not None
                self._recomputer.run(restoration, self._make_room)

    def wait(self, layer: int) -> None:
        """Make layer `layer`'s loaded K/V valid for compute work submitted after.

        Pieces of other layers that were copied before its own become valid with it.
        """
        if self._ends is not None:
            layer = self._ends.numbers[layer]
        self._wait(layer)

    def _wait(self, layer: int) -> None:
        """`wait`, by the number of a layer in this pass."""
        self._submit_beside(layer)
        while self._open[layer]:
            self._advance()
        if layer in self._beside:
            self._copy_stream.before_compute(self._beside.pop(layer))

    def finish(self) -> None:
        """Write the pieces that no attention asked for, so that all slots are valid in any case."""
        while self._staged or self._todo:
            self._advance()
        for layer in list(self._beside):
            self._wait(layer)
        self._staging.release(self.finish)
        self._observer.finished()

    def abandon(self) -> None:
        """An error ended the pass: nothing more is written to its slots. Waits for what is under
        way and gives its frames back. What the slots hold is of no use."""
        self._todo.clear()
        self._open.clear()
        self._beside.clear()
        self._copy_stream.record().wait()
        if self._side_stream is not None:
            with self._side_stream():
                self._copy_stream.computed().wait()
        while self._staged:
            self._staged.popleft().done()
        self._staging.release(self.finish)

    def _in_order(self, loads: Sequence[_Load], kv_per_hidden: float) -> Iterator[_Load]:
        """The loads in the order of their copies. Within a form it is the order of the layers."""
        if self._ends is not None:  # nothing is projected, and all goes by the order of the model
            places = {number: place for place, number in enumerate(self._ends.numbers.values())}
            drafts = len(places)  # a draft model runs behind the model
            return iter(sorted(loads, key=lambda load: places.get(load.layer, drafts)))
        rows: Counter[int] = Counter()
        for load in loads:
            rows[load.layer] += load.piece.rows
        shares: dict[Form, list[tuple[float, _Load]]] = {Form.HIDDEN: [], Form.KV: []}
        for load in loads:
            part = load.piece.rows / rows[load.layer]
            shares[self._layout.form(load.layer)].append((part, load))
        return merged(shares[Form.HIDDEN], shares[Form.KV], kv_per_hidden)

    def _submit_beside(self, layer: int) -> None:
        """With a side stream, write the pieces of `layer` and of the next layers to the pool."""
        if self._side_stream is None:
            return
        for near in range(layer, layer + SIDE_LAYERS):
            while self._open[near]:
                self._advance()

    def _make_room(self) -> None:
        """Write the pieces whose copies are over to the pool, so that copies go on. Between two
        passes of a recomputation the thread waits for the device, and all frames fill up. Ranks
        that restore together write the same pieces, whichever rank's copies are over."""
        if self._staging.in_step:
            for _ in range(len(self._staged)):
                if self._waits_for_turn(self._staged[0]):
                    return
                self._advance()
            return
        while self._staged and not self._waits_for_turn(self._staged[0]):
            if not self._staged[0].event.done():
                return
            self._advance()

    def _waits_for_turn(self, staged: _Staged) -> bool:
        return self._in_turn and self._layout.form(staged.layer) is Form.HIDDEN

    def _loads(self) -> Iterator[_Load]:
        """Everything that is to be loaded, in the order in which the model needs it."""
        starts = [r.recompute for r in self._ordered]
        key: tuple[int, int, int] | None = None
        pieces: list[Piece] = []
        for layer in self._layout.stored_layers:
            count, lag = bisect_right(starts, layer), self._layout.lag(layer)
            limit = self._staging.rows(sum(self._source.widths(layer)))
            if key != (count, limit, lag):  # the layers of a form have the same pieces
                rows = [r.spans(r.start + lag, r.stop + lag) for r in self._ordered[:count]]
                pieces = list(cut([span for spans in rows for span in spans], limit))
                key = count, limit, lag
            yield from (_Load(layer, piece) for piece in pieces)
        yield from self._window_loads()

    def _window_loads(self) -> Iterator[_Load]:
        """As `_loads`, of the layers with sliding windows."""
        if self._ends is None or not self._windows:
            return
        first = self._source.first_window
        limit = self._staging.rows(sum(self._source.widths(first)))
        spans = [span for window in self._windows for span in window.spans()]
        pieces = list(cut(spans, limit))
        for index in range(len(self._ends.pool.layout.window.layers)):
            yield from (_Load(first + index, piece) for piece in pieces)

    def _run_ahead(self) -> None:
        """Enqueue copies into every free frame."""
        begin = self._observer.copies_begin()
        rows: Counter[int] = Counter()
        while self._todo and self._staging.has_free:
            layer, piece = self._todo.popleft()
            frame = self._staging.take()
            done = partial(self._staging.give_back, frame)
            try:
                parts = carve(frame, piece.rows, self._source.widths(layer))
                for source, target in zip(self._source.parts(layer), parts, strict=True):
                    copy_piece(self._copy_stream, piece, source, target)
                event = self._copy_stream.record()
            except Exception:
                done()
                raise
            self._staged.append(_Staged(layer, piece.first, parts, event, done))
            rows[layer] += piece.rows
        self._observer.copies_end(begin, rows)

    def _advance(self) -> None:
        """Write the oldest staged piece to the pool, in the stream in which restorations run."""
        if self._side_stream is None:
            self._write()
            return
        with self._side_stream():
            if self._before_side is not None:
                self._copy_stream.before_compute(self._before_side)
                self._before_side = None
            layer = self._staged[0].layer
            self._write()
            if not self._open[layer]:
                self._beside[layer] = self._copy_stream.computed()

    def _write(self) -> None:
        """Write the oldest staged piece to the pool and give its frame back."""
        layer, first, parts, event, done = self._staged[0]
        self._copy_stream.before_compute(event)
        rows = slice(first, first + parts[0].shape[0])
        window = self._source.window_layer(layer)
        form = Form.WINDOW if window is not None else self._layout.form(layer)
        slots = self._slots[rows] if window is None else self._window_slots[rows]
        if form is Form.KV:
            parts = list(self._moved(layer, parts, rows))
        begin = self._observer.write_begin(form, beside=self._side_stream is not None)
        if form is Form.HIDDEN:
            self._sink.write_hidden(layer, parts[0], self._positions[rows], slots)
        elif window is not None:
            assert self._ends is not None
            self._ends.sink.write_kv(window, parts, slots)
        else:
            self._sink.write_kv(layer, parts, slots)
        self._observer.write_end(begin, form, slots.numel())
        self._staged.popleft()
        self._open[layer] -= 1
        done()
        self._run_ahead()

    def _moved(
        self, layer: int, parts: Sequence[torch.Tensor], rows: slice
    ) -> Sequence[torch.Tensor]:
        """KV rows, rotated to their present positions if they have moved."""
        if self._moved_from is None:
            return parts
        assert self._rotation is not None, "this model's state does not move"
        return self._rotation.move(layer, parts, self._moved_from[rows], self._positions[rows])


def _moved_from(
    restorations: Sequence[Restoration], positions: torch.Tensor
) -> torch.Tensor | None:
    """Positions at which the rows were computed; None if no row has moved."""
    if all(node.moved is None for restoration in restorations for node in restoration.nodes):
        return None  # nearly always, and then no row needs a number
    shifts = np.concatenate([r.shifts() for r in restorations])
    return positions + torch.from_numpy(shifts).to(positions.device) if shifts.any() else None


class LayerGate:
    """What the KV pool asks before a layer's attention reads: SGLang's layer-transfer counter.

    The consumer index of a batch names the pass for which it waits. A batch keeps its index, so an
    index whose pass is over must cost nothing.
    """

    def __init__(self, observer: CostObserver | None = None) -> None:
        """observer: sees how long a prefill's layers take; every attention passes the gate."""
        self._observer = observer
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
        """Run the recomputed layers of a pass. They wait for the layers to which they attend."""
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
        current = self._current
        if current is not None:
            current.wait(layer)
        if self._observer is not None:
            self._observer.layer_reached(layer, restores=current is not None)

    def finish(self) -> tuple[Restoration, ...]:
        """The forward pass is over: complete its restorations, and forget the restore pass."""
        current, self._current = self._current, None
        if current is None:
            return ()
        current.finish()
        del self._passes[self.current]
        return current.restorations
