"""Times restorations and prefills while the server runs, without waiting for any of them.

Only what uses known resources alone is an observation; everything else is left out rather than put
down to the wrong resource:

    copies       on an accelerator the copies that a pass enqueues first, into free frames, between
                 two events of the copy stream; on a CPU all copies of a pass, and writing K and V
                 to the pool.
    projection   the sink's own work: between two events around it, or by the clock.
    prefill      a batch of prefills alone (no decodes, no restoration), from the attention of its
                 first layer to that of its last: embedding and logits are not in it.

What reads from below host memory take is seen where they are asked for (`store.lower_tier`). On
CUDA times come from events that later passes query; no call here waits for the device.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sglang_hc.device.copy_stream import CopyStream, CudaCopyStream
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, Form
from sglang_hc.policy.correction import Resource
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.store.scatter_queue import Event

PENDING = 64
"""Most observations that wait for the device; further ones are dropped."""


class HostTimer:
    """Points in time on a host, where everything happens at once.

    synchronous: work is done when the call that submits it returns. compute, copies: now, in the
    order of the compute work and of the copies.
    """

    synchronous = True

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.compute = self.copies = clock

    def seconds(self, begin: float, end: float) -> float | None:
        """Between two points; None while the later one is still to come."""
        return end - begin


class CudaTimer:
    """As `HostTimer`, by events on the current stream and on the stream of the copies."""

    synchronous = False

    def __init__(self, copies: torch.cuda.Stream) -> None:
        self._copies = copies

    def compute(self) -> Any:
        return _event(torch.cuda.current_stream())

    def copies(self) -> Any:
        return _event(self._copies)

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        if not end.query():  # type: ignore[no-untyped-call]
            return None
        return float(begin.elapsed_time(end)) / 1e3


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def timer_for(copy_stream: CopyStream) -> HostTimer | CudaTimer:
    """The timer of a copy stream."""
    if isinstance(copy_stream, CudaCopyStream):
        return CudaTimer(copy_stream.stream)
    return HostTimer()


class _Pending(NamedTuple):
    parts: Mapping[Resource, float]
    begin: Any
    end: Any


class CostObserver:
    """Tells the costs of one server what was observed. Belongs to the scheduler thread."""

    def __init__(
        self,
        costs: CostModel,
        layout: BlockLayout,
        timer: HostTimer | CudaTimer,
        copy_stream: CopyStream,
    ) -> None:
        self.costs = costs
        self.timer = timer
        self._layout = layout
        self._last = layout.plan.num_layers - 1
        self._copy_stream = copy_stream
        self._pending: deque[_Pending] = deque()
        self._restored: Event | None = None
        """Behind the compute work of the last restoration."""
        self._prefill: dict[Resource, float] = {}
        """What a layer of the prefill that is being timed takes, as measured at the start; empty
        for none."""
        self._begin: Any = None

    def between(self, parts: Mapping[Resource, float], begin: Any, end: Any) -> None:
        """Work that should take so long by what was measured lies between two points of the
        timer."""
        if len(self._pending) < PENDING:
            self._pending.append(_Pending(parts, begin, end))
        self.poll()

    def poll(self) -> None:
        """Take in the times that are known by now. Never waits."""
        while self._pending:
            parts, begin, end = self._pending[0]
            seconds = self.timer.seconds(begin, end)
            if seconds is None:
                return
            self._pending.popleft()
            self.costs.observe(parts, seconds)

    # -- restorations ----------------------------------------------------------------------------

    def copied(self, rows: Mapping[int, int]) -> dict[Resource, float]:
        """What copying so many rows of each layer from host memory takes, as measured at the start.
        Empty for less than a block, which says nothing."""
        if max(rows.values(), default=0) < BLOCK_TOKENS:
            return {}
        host, parts = self.costs.copies[SourceTier.HOST], dict[Resource, float]()
        for layer, count in rows.items():
            is_kv = self._layout.form(layer) is Form.KV
            resource = Resource.KV_COPY if is_kv else Resource.HIDDEN_COPY
            line = host.kv if is_kv or host.hidden is None else host.hidden
            parts[resource] = parts.get(resource, 0.0) + line.seconds(count)
        return parts

    def projected(self, rows: int) -> dict[Resource, float]:
        """What projecting so many rows of a layer takes, as measured at the start."""
        assert self.costs.project is not None
        return {Resource.PROJECTION: self.costs.project.seconds(rows)}

    @property
    def frames_free(self) -> bool:
        """No restoration is under way: copies into free frames wait for nothing."""
        return self._restored is None or self._restored.done()

    def restored(self) -> None:
        """All compute work of a restoration is submitted."""
        self._restored = self._copy_stream.computed()

    # -- prefills --------------------------------------------------------------------------------

    def prefill_begins(self, lengths: Sequence[tuple[int, int]]) -> None:
        """The pass about to run is one prefill of (new, context) tokens per request, and nothing
        else. Without this call a pass is not timed."""
        self.pass_ended()
        if self._last and sum(new for new, _ in lengths) >= BLOCK_TOKENS:
            attention, other = self.costs.prefill.batch(lengths)
            self._prefill = {Resource.ATTENTION: attention, Resource.PREFILL: other}

    def pass_ended(self) -> None:
        """Whatever was being timed is over."""
        self._prefill, self._begin = {}, None

    def layer_reached(self, layer: int, *, restores: bool) -> None:
        """The attention of a layer is about to read. restores: a restoration runs between the
        layers of this pass."""
        if not self._prefill:
            return
        if restores:
            self.pass_ended()
        elif layer == 0 and self._begin is None:
            self._begin = self.timer.compute()
        elif layer == self._last and self._begin is not None:
            parts = {resource: self._last * part for resource, part in self._prefill.items()}
            self.between(parts, self._begin, self.timer.compute())
            self.pass_ended()


class PassObserver:
    """Times a restore pass: where work is synchronous all of it, else its first copies and its
    first projection, because events cost the thread that submits them.

    `*_begin` returns a point in time, None for work that is not timed; `*_end` takes it.
    """

    def __init__(self, observer: CostObserver | None) -> None:
        """observer: None where nothing is timed."""
        self._observer = observer
        self._is_whole = observer is not None and observer.timer.synchronous
        self._times_copies = self._is_whole or (observer is not None and observer.frames_free)
        self._times_projection = observer is not None
        self._rows: Counter[int] = Counter()
        self._copying = self._projecting = 0.0
        """Seconds, where work is synchronous."""
        self._projection = 0.0
        """What `_projecting` should be, as measured at the start."""

    def copies_begin(self) -> Any:
        """Copies are about to be enqueued."""
        if self._observer is None or not self._times_copies:
            return None
        return self._observer.timer.copies()

    def copies_end(self, begin: Any, rows: Mapping[int, int]) -> None:
        """rows: how many of each layer were enqueued."""
        if self._observer is None or begin is None:
            return
        end = self._observer.timer.copies()
        if self._is_whole:
            self._rows.update(rows)
            self._copying += end - begin
            return
        self._times_copies = False  # what follows waits for frames, and so for compute
        parts = self._observer.copied(rows)
        if parts:
            self._observer.between(parts, begin, end)

    def write_begin(self, form: Form, beside: bool) -> Any:
        """Staged rows are about to be written to the pool. beside: in a stream beside the compute
        stream, where the time says nothing."""
        is_first = form is Form.HIDDEN and self._times_projection and not beside
        if self._observer is None or not (self._is_whole or is_first):
            return None
        return self._observer.timer.compute()

    def write_end(self, begin: Any, form: Form, rows: int) -> None:
        """rows: how many were written."""
        if self._observer is None or begin is None:
            return
        end = self._observer.timer.compute()
        if form is Form.KV:
            self._copying += end - begin
            return
        parts = self._observer.projected(rows)
        if self._is_whole:
            self._projecting += end - begin
            self._projection += parts[Resource.PROJECTION]
            return
        self._times_projection = False
        if rows >= BLOCK_TOKENS:
            self._observer.between(parts, begin, end)

    def finished(self) -> None:
        """All work of the pass is submitted. May be called again."""
        observer, self._observer = self._observer, None
        if observer is None:
            return
        observer.restored()
        if self._is_whole:
            observer.costs.observe(observer.copied(self._rows), self._copying)
            if self._projection:
                observer.costs.observe({Resource.PROJECTION: self._projection}, self._projecting)
