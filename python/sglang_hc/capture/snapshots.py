"""Two-stage saving (HCache section 4.2.2): rows leave the device in batches, and another thread
scatters them into slots.

`Snapshots` gathers the rows of many passes in one staging buffer on the device and copies it to the
host at once. `ScatterQueue` hands the host copy to the I/O executor, which scatters the rows into
slots, and knows when all bytes of a slot are in place.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_hc.device.copy_stream import CopyStream, Event
from sglang_hc.store.executor import (
    Completion,
    CopyRows,
    CopySlot,
    Executor,
    Operation,
    Point,
    RowSpan,
    ScatterRows,
)
from sglang_hc.store.host_pool import Bytes
from sglang_hc.tree.host_tier import HostTier

logger = logging.getLogger(__name__)


Fill = Callable[[list[torch.Tensor], int, int, int], None]
"""fill(targets, at, first, count): source rows [first, first + count) to rows [at, at + count) of
each target, of shape (layers, capacity, row bytes), by work on the compute stream."""


class Progress:
    """Progress of one operation."""

    def __init__(self, *, done: bool = False) -> None:
        self.done = done
        self._then: list[Callable[[], object]] = []

    def then(self, callback: Callable[[], object]) -> None:
        """Call this when it is done, now if it is."""
        if self.done:
            callback()
        else:
            self._then.append(callback)

    def finish(self) -> None:
        self.done = True
        for callback in self._then:
            callback()


class ScatterQueue:
    """Operations on their way to the executor, in order. Belongs to the scheduler thread.

    host: owns the slots; learns which ones an operation failed to write, or may yet write.
    points_too: the executor is told of points in the order as well. On several ranks it must be,
    because they learn together that a point was passed.
    """

    def __init__(self, executor: Executor, host: HostTier, *, points_too: bool = False) -> None:
        self.executor = executor
        self._points_too = points_too
        self._host = host
        self._given_up: dict[int, list[int]] = {}
        """Slots by the tickets of operations that were given up and not answered since."""
        self._tickets = itertools.count(1)
        self._waiting: deque[tuple[Event | None, Operation | None, Progress]] = deque()
        self._running: dict[int, tuple[Operation, Progress]] = {}
        self._passed: list[Progress] = []
        """Points that everything has passed, until the next poll says so."""
        self._last = Progress(done=True)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._passed)

    def submit(self, operation: Operation | None, after: Event | None = None) -> Progress:
        """Queue an operation, or nothing, that may start once `after` is done."""
        self._last = Progress()
        self._waiting.append((after, operation, self._last))
        self._feed()
        return self._last

    def pass_point(self, after: Event) -> Progress:
        """A point in the order of operations, for bytes that reach their slots without an
        operation. It is done when `after` and all earlier operations are done; later operations
        wait for it.
        """
        return self.submit(Point() if self._points_too else None, after)

    def last(self) -> Progress:
        """Progress of the operation submitted last. When it is done, all earlier ones are."""
        return self._last

    def poll(self) -> None:
        """Feed the executor and take in what it has completed. Never waits."""
        self._feed()
        self._take_in(self.executor.poll())

    def drain(self) -> None:
        """Wait until everything submitted is in place, for at most DRAIN_S: what is under way then
        failed, and its slots get no new owner before it is answered. For flushes, not for the hot
        path."""
        while self._waiting:
            event = self._waiting[0][0]
            if event is not None:
                event.wait()
            self._feed()
        self._take_in(self.executor.drain())
        if self._running:
            logger.error("sglang-hc: given up: %d scatters not done in time", len(self._running))
            slots = {ticket: _targets(one) for ticket, (one, _) in self._running.items()}
            self._take_in([Completion(ticket, False, stuck=True) for ticket in slots])
            self._given_up |= slots

    def close(self) -> None:
        """Finish and stop the executor."""
        self.drain()
        self.executor.close()

    def _feed(self) -> None:
        while self._waiting:
            event, operation, progress = self._waiting[0]
            if event is not None and not event.done():
                return
            self._waiting.popleft()
            if operation is not None:
                ticket = next(self._tickets)
                self._running[ticket] = (operation, progress)
                self.executor.submit(ticket, operation)
            elif self._running:
                _, before = next(reversed(self._running.values()))
                before.then(progress.finish)
            else:
                self._passed.append(progress)

    def _take_in(self, completions: list[Completion]) -> None:
        passed, self._passed = self._passed, []
        for progress in passed:
            progress.finish()
        for done in completions:
            if done.ticket in self._given_up:
                self._host.give_back(self._given_up.pop(done.ticket))
            else:
                self._complete(*done)

    def _complete(self, ticket: int, ok: bool, stuck: bool) -> None:
        operation, progress = self._running.pop(ticket)
        damaged = self._host.damaged_slots
        bad = isinstance(operation, (CopyRows, CopySlot)) and operation.source in damaged
        if bad or not ok:
            damaged.update(_targets(operation))
        if stuck:
            self._host.withhold(_targets(operation))
        progress.finish()


def _targets(operation: Operation) -> list[int]:
    if isinstance(operation, ScatterRows):
        return [span.slot for span in operation.spans]
    return [operation.target] if isinstance(operation, (CopyRows, CopySlot)) else []


@dataclass(eq=False)
class _Snapshot:
    """A snapshot and its staging on the device. Without a device they are the same memory."""

    index: int
    host: torch.Tensor
    device: torch.Tensor


class Snapshots:
    """Hidden states gathered until they are worth one copy.

    Not thread-safe. `capacity` rows each. Rows that find no free snapshot are refused: a slow
    executor loses rows, but the scheduler never waits for it.
    """

    def __init__(
        self,
        buffers: Sequence[Bytes],
        staging: torch.Tensor | None,
        copy_stream: CopyStream,
        scatters: ScatterQueue,
    ) -> None:
        """buffers: `HostMemory.snapshots`, by the numbers that the executor knows.

        staging: memory of the device, uint8, as large as all buffers; None where the device has no
        memory of its own.
        """
        self._copy_stream = copy_stream
        self._scatters = scatters
        self.capacity: int = buffers[0].shape[1]
        self.free: list[_Snapshot] = []
        for index, buffer in enumerate(buffers):
            host = device = torch.from_numpy(buffer)
            if staging is not None:
                size = host.numel()
                device = staging[index * size : (index + 1) * size].view(host.shape)
                copy_stream.pin(buffer)
            self.free.append(_Snapshot(index, host, device))
        self._current: _Snapshot | None = None
        self._rows = 0
        self._spans: list[RowSpan] = []

    @property
    def room(self) -> int:
        """Rows that can be added now without waiting."""
        free = len(self.free) * self.capacity
        return free + (self.capacity - self._rows if self._current is not None else 0)

    def add(self, low: int, stop: int, fill: Fill, spans: Sequence[RowSpan]) -> None:
        """Take the source rows [low, stop), which `fill` writes; `spans` name some of them. The
        caller checked `room`."""
        while low < stop:
            if self._current is None:
                self._current, self._rows = self.free.pop(), 0
            count = min(stop - low, self.capacity - self._rows)
            fill([self._current.device], self._rows, low, count)
            self._spans += shifted(spans, low, low + count, self._rows - low)
            self._rows += count
            low += count
            if self._rows == self.capacity:
                self.flush()

    def flush(self) -> None:
        """Have what was gathered scattered."""
        snapshot = self._current
        if snapshot is None:
            return
        self._current = None
        if snapshot.device is not snapshot.host:
            self._copy_stream.after(self._copy_stream.computed())
            width = self._rows * snapshot.host.shape[2]
            host, device = snapshot.host.flatten(1), snapshot.device.flatten(1)
            self._copy_stream.copy(host[:, :width], device[:, :width])
        operation = ScatterRows(snapshot.index, tuple(self._spans))
        self._spans = []
        scattered = self._scatters.submit(operation, after=self._copy_stream.record())
        scattered.then(lambda: self.free.append(snapshot))


def shifted(spans: Sequence[RowSpan], low: int, high: int, shift: int) -> list[RowSpan]:
    """Parts of `spans` whose source rows lie in [low, high), with source rows moved by `shift`."""
    parts = []
    for source, slot, slot_row, rows in spans:
        start, stop = max(source, low), min(source + rows, high)
        if start < stop:
            parts.append(RowSpan(start + shift, slot, slot_row + start - source, stop - start))
    return parts
