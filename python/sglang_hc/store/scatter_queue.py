"""Operations on their way to the executor, in the order in which their bytes are to be in place.

An operation waits for the point in the device's work behind which its bytes are there.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from sglang_hc.store.executor import (
    Completion,
    CopyRows,
    CopySlot,
    Executor,
    Operation,
    Point,
    ScatterRows,
)
from sglang_hc.tree.host_tier import HostTier

logger = logging.getLogger(__name__)


class Event(Protocol):
    """A point in the order of a device's work: of copies, or of computing."""

    def done(self) -> bool:
        """Everything enqueued before the event has happened. Never waits."""

    def wait(self) -> None:
        """Block the host until `done`."""


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
