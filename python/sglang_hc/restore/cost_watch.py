"""Times restorations and prefills while the server runs, without waiting for any of them.

Only what uses one resource alone is an observation; everything else is left out rather than put
down to the wrong resource:

    copies       on an accelerator the copies that a pass enqueues at once into free frames, between
                 two events of the copy stream; on a CPU all the time that the pass takes, without
                 its projections, unless K is rotated in it. Where both forms are copied, the same
                 ratio counts for each that has at least MIXED_SHARE of the prediction, because they
                 share a link.
    projection   the sink's own work: between two events around it, or by the clock.
    prefill      a batch of prefills alone (no decodes, no restoration), from the attention of its
                 first layer to that of its last: embedding and logits are not in it.

What reads from below host memory take is seen where they are asked for (`store.disk_tier`). On CUDA
times come from events that later passes query; no call here waits for the device.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from sglang_hc.device.copy_stream import CopyStream, CudaCopyStream, Event
from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.cost_correction import CorrectedCosts, Resource
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.restore.path import Restoration, RestorePath, RestoreSink
from sglang_hc.restore.restore_pass import LayerGate, RestorePass, rows_of

MIXED_SHARE = 0.2
"""An observation of several forms counts for those with at least this share of the prediction."""

PENDING = 64
"""Most observations that wait for the device; further ones are dropped."""


class Timer(Protocol):
    """Points in time on the device, and the seconds between them."""

    synchronous: bool
    """Work is done when the call that submits it returns."""

    def compute(self) -> Any:
        """Now, in the order of the compute work."""

    def copies(self) -> Any:
        """Now, in the order of the copies."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Between two points; None while the later one is still to come."""


class HostTimer:
    """Where everything happens at once."""

    synchronous = True

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.compute = self.copies = clock

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin


class CudaTimer:
    """Events with times, on the current stream and on the stream of the copies."""

    synchronous = False

    def __init__(self, copies: torch.cuda.Stream) -> None:
        self._copies = copies

    def compute(self) -> torch.cuda.Event:
        return _event(torch.cuda.current_stream())

    def copies(self) -> torch.cuda.Event:
        return _event(self._copies)

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        if not end.query():  # type: ignore[no-untyped-call]
            return None
        return float(begin.elapsed_time(end)) / 1e3


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def timer_for(copy_stream: CopyStream) -> Timer:
    """The timer of a copy stream."""
    if isinstance(copy_stream, CudaCopyStream):
        return CudaTimer(copy_stream.stream)
    return HostTimer()


class _Pending(NamedTuple):
    resources: tuple[Resource, ...]
    predicted: float
    begin: Any
    end: Any


class CostWatch:
    """Tells the costs of one server what was observed. Belongs to the scheduler thread."""

    def __init__(
        self, costs: CorrectedCosts, plan: LayerPlan, timer: Timer, copy_stream: CopyStream
    ) -> None:
        self.costs = costs
        self.plan = plan
        self.timer = timer
        self._copy_stream = copy_stream
        self._pending: deque[_Pending] = deque()
        self._restored: Event | None = None
        """Behind the compute work of the last restoration."""

    def between(
        self, resources: tuple[Resource, ...], predicted: float, begin: Any, end: Any
    ) -> None:
        """Work that should take `predicted` seconds lies between two points of the timer."""
        if len(self._pending) < PENDING:
            self._pending.append(_Pending(resources, predicted, begin, end))
        self.poll()

    def took(self, resources: Iterable[Resource], predicted: float, observed: float) -> None:
        """Something that uses these resources alone took `observed` seconds."""
        for resource in resources:
            self.costs.observe(resource, predicted, observed)

    def poll(self) -> None:
        """Take in the times that are known by now. Never waits."""
        while self._pending:
            resources, predicted, begin, end = self._pending[0]
            seconds = self.timer.seconds(begin, end)
            if seconds is None:
                return
            self._pending.popleft()
            self.took(resources, predicted, seconds)

    # -- restorations ----------------------------------------------------------------------------

    def copies(self, rows: Counter[int]) -> tuple[tuple[Resource, ...], float]:
        """Copies of `rows` rows of each layer from host memory: the resources that their time says
        something about, and the predicted seconds."""
        cost, host = self.costs.measured, SourceTier.HOST
        kv = sum(cost.copy_kv(host, rows[layer]) for layer in self.plan.kv_layers)
        hidden = 0.0
        if self.plan.hidden:
            hidden = sum(cost.copy_hidden(host, rows[layer]) for layer in self.plan.hidden_layers)
        shares = ((Resource.KV_COPY, kv), (Resource.HIDDEN_COPY, hidden))
        told = tuple(form for form, part in shares if part >= MIXED_SHARE * (kv + hidden) > 0)
        return told, kv + hidden

    @property
    def frames_free(self) -> bool:
        """No restoration is under way: copies into free frames wait for nothing."""
        return self._restored is None or self._restored.done()

    def restored(self) -> None:
        """All compute work of a restoration is submitted."""
        self._restored = self._copy_stream.computed()


class _TimedSink:
    """A sink whose projections are timed: all of them where work is synchronous, else the first of
    a pass, because events cost the thread that submits them."""

    def __init__(self, sink: RestoreSink, watch: CostWatch, beside: bool) -> None:
        """beside: projections run beside other compute work, so their time says nothing."""
        self._sink = sink
        self._watch = watch
        self._timing = not beside
        self.seconds = 0.0
        self.predicted = 0.0

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        if not self._timing:
            self._sink.write_hidden(layer, hidden, positions, slots)
            return
        timer = self._watch.timer
        begin = timer.compute()
        self._sink.write_hidden(layer, hidden, positions, slots)
        end = timer.compute()
        predicted = self._watch.costs.measured.project_kv(slots.numel())
        if timer.synchronous:
            self.seconds += timer.seconds(begin, end) or 0.0
            self.predicted += predicted
        else:
            self._timing = False
            if slots.numel() >= BLOCK_TOKENS:
                self._watch.between((Resource.PROJECTION,), predicted, begin, end)

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        self._sink.write_kv(layer, parts, slots)


class WatchedPass(RestorePass):
    """A `RestorePass` that tells a watch what its copies and projections take."""

    def __init__(
        self,
        watch: CostWatch,
        path: RestorePath,
        restorations: Sequence[Restoration],
        kv_per_hidden: float = 0.0,
    ) -> None:
        self._watch = watch
        self._timed = _TimedSink(path.sink, watch, beside=path.side_stream is not None)
        self._rows: Counter[int] | None = None
        """Rows to be copied per layer; None until the first copies are about to be enqueued."""
        self._is_clean = False
        self._spent = 0.0
        self._depth = 0
        self._over = False
        begin = super().__init__
        timed = replace(path, sink=self._timed)
        self._clocked(lambda: begin(timed, restorations, kv_per_hidden))

    def wait(self, layer: int) -> None:
        wait = super().wait
        self._clocked(lambda: wait(layer))

    def finish(self) -> None:
        self._clocked(super().finish)
        if not self._over:
            self._over = True
            self._tell()

    def _run_ahead(self) -> None:
        if self._rows is not None:
            super()._run_ahead()
            return
        self._rows = rows_of(self._todo)
        watch = self._watch
        rotated = watch.timer.synchronous and self._moved_from is not None
        tokens = sum(r.stop - r.start for r in self._ordered)
        self._is_clean = not rotated and tokens >= BLOCK_TOKENS
        if watch.timer.synchronous or not (self._is_clean and watch.frames_free):
            super()._run_ahead()
            return
        loads = list(self._todo)
        begin = watch.timer.copies()
        super()._run_ahead()
        end = watch.timer.copies()
        told, predicted = watch.copies(rows_of(loads[: len(loads) - len(self._todo)]))
        watch.between(told, predicted, begin, end)

    def _clocked(self, work: Callable[[], None]) -> None:
        """Run, and where work is synchronous count the time; one call may contain another."""
        timer = self._watch.timer
        self._depth += 1
        begin = timer.compute() if timer.synchronous else None
        try:
            work()
        finally:
            self._depth -= 1
            if timer.synchronous and self._depth == 0:
                self._spent += timer.seconds(begin, timer.compute()) or 0.0

    def _tell(self) -> None:
        watch, timed = self._watch, self._timed
        watch.restored()
        if not (watch.timer.synchronous and self._is_clean):
            return
        assert self._rows is not None
        told, predicted = watch.copies(self._rows)
        watch.took(told, predicted, self._spent - timed.seconds)
        watch.took([Resource.PROJECTION], timed.predicted, timed.seconds)


class WatchedGate(LayerGate):
    """The layer gate; every attention passes it, so it sees how long a prefill's layers take."""

    def __init__(self, num_layers: int, watch: CostWatch | None) -> None:
        """watch: None where there are no costs to correct."""
        super().__init__()
        self._last = num_layers - 1
        self._watch = watch
        self._layer_seconds = 0.0
        self._begin: Any = None

    def prefill_begins(self, lengths: Sequence[tuple[int, int]]) -> None:
        """The pass about to run is one prefill of (new, context) tokens per request, and nothing
        else. Without this call a pass is not timed."""
        self.pass_ended()
        new = sum(count for count, _ in lengths)
        if self._watch is None or not self._last or new < BLOCK_TOKENS:
            return
        pairs = sum(count * (context + 0.5 * count) for count, context in lengths)
        prefill = self._watch.costs.measured.prefill
        self._layer_seconds = prefill.seconds(new, pairs / new - 0.5 * new)

    def pass_ended(self) -> None:
        """Whatever was being timed is over."""
        self._layer_seconds, self._begin = 0.0, None

    def wait_until(self, layer: int) -> None:
        super().wait_until(layer)
        if self._layer_seconds:
            self._time(layer)

    def _time(self, layer: int) -> None:
        assert self._watch is not None
        if self._current is not None:  # a restoration runs between the layers
            self.pass_ended()
        elif layer == 0 and self._begin is None:
            self._begin = self._watch.timer.compute()
        elif layer == self._last and self._begin is not None:
            predicted = self._last * self._layer_seconds
            end = self._watch.timer.compute()
            self._watch.between((Resource.PREFILL,), predicted, self._begin, end)
            self.pass_ended()
