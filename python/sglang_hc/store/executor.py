"""The I/O executor: bulk work off the scheduler thread behind submit and poll.

Operations run in the order they were submitted. A completion says that every byte the operation
writes is in place. An operation that fails is reported, never raised: its slots must not be served.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sglang_hc.store.host_pool import Bytes, HostPool
from sglang_hc.store.workers import Workers

logger = logging.getLogger(__name__)

DRAIN_S = 30.0
"""Longest that a flush, new weights or an orderly stop wait for operations that are under way.
SGLang's watchdog ends a scheduler that stands still for 300 s."""


class RowSpan(NamedTuple):
    """`rows` consecutive rows of a snapshot that go to consecutive rows of one slot."""

    source_row: int
    slot: int
    slot_row: int
    rows: int


@dataclass(frozen=True)
class ScatterRows:
    """Scatter the rows of a snapshot into slots, in all hidden layers."""

    snapshot: int
    spans: tuple[RowSpan, ...]


@dataclass(frozen=True)
class CopyRows:
    """Copy the hidden states of the first `rows` tokens of one slot to another."""

    source: int
    target: int
    rows: int


@dataclass(frozen=True)
class CopySlot:
    """Copy all bytes of one slot to another."""

    source: int
    target: int


@dataclass(frozen=True)
class Point:
    """Nothing to do: a point in the order of operations."""


Operation = ScatterRows | CopyRows | CopySlot | Point


class Completion(NamedTuple):
    """Answer to an operation, under the ticket that its caller gave it. stuck: it was given up, and
    may write to its slots at any later time."""

    ticket: int
    ok: bool
    stuck: bool = False


class Executor(Protocol):
    """Runs operations elsewhere, in the order in which they were submitted. `submit` and `poll`
    never wait and belong to one thread."""

    def submit(self, ticket: int, operation: Operation) -> None:
        """Queue an operation. ticket: a number that no other operation under way has."""

    def poll(self) -> list[Completion]:
        """Completions since the last call, in the order in which they were submitted."""

    def drain(self) -> list[Completion]:
        """Wait until everything submitted has completed, for at most DRAIN_S; for flushes and
        tests."""

    def close(self) -> None:
        """Finish what is queued, for at most DRAIN_S, and stop."""


SCATTER_THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Threads that scatter one snapshot. numpy copies without Python's lock; a machine of few cores
needs them for the model."""

_SHARE_BYTES = 4 << 20
"""Least that is worth another thread."""


def perform(operation: Operation, pool: HostPool, snapshots: Sequence[Bytes]) -> None:
    """Carry out one operation on the calling thread. snapshots: see `HostMemory`."""
    if isinstance(operation, CopyRows):
        pool.copy_rows(operation.source, operation.target, operation.rows)
    elif isinstance(operation, CopySlot):
        pool.bytes[operation.target] = pool.bytes[operation.source]
    elif isinstance(operation, ScatterRows):
        _scatter(operation.spans, snapshots[operation.snapshot], pool)


def _scatter(spans: Sequence[RowSpan], rows: Bytes, pool: HostPool) -> None:
    for source, slot, target, count in spans:
        pool.hidden[slot, :, target : target + count] = rows[:, source : source + count]


def shares(spans: Sequence[RowSpan], count: int) -> list[list[RowSpan]]:
    """At most `count` parts of `spans` of about as many rows. All spans of a slot are in one part,
    in their order: rows that are written twice end as the last span says."""
    by_slot: dict[int, list[RowSpan]] = {}
    for span in spans:
        by_slot.setdefault(span.slot, []).append(span)
    parts: list[list[RowSpan]] = [[] for _ in range(count)]
    sizes = [0] * count
    for of_slot in by_slot.values():
        least = sizes.index(min(sizes))
        parts[least] += of_slot
        sizes[least] += sum(span.rows for span in of_slot)
    return [part for part in parts if part]


class ThreadExecutor:
    """Executor on one thread of this process; others help with the rows of a large snapshot.

    threads: that scatter one snapshot, that one included.
    """

    def __init__(
        self,
        pool: HostPool,
        snapshots: Sequence[Bytes],
        threads: int = SCATTER_THREADS,
    ) -> None:
        self._threads = threads
        self._helpers = ThreadPoolExecutor(threads - 1, "hc-scatter") if threads > 1 else None
        self._pool = pool
        self._snapshots = snapshots
        self._under_way = 0
        """Operations that were submitted and whose completion nobody has taken."""
        self._done: deque[Completion] = deque()
        self._thread: Workers[tuple[int, Operation]] = Workers("hc-io", self._run)

    def submit(self, ticket: int, operation: Operation) -> None:
        self._under_way += 1
        self._thread.submit((ticket, operation))

    def poll(self) -> list[Completion]:
        done = [self._done.popleft() for _ in range(len(self._done))]
        self._under_way -= len(done)
        return done

    def drain(self) -> list[Completion]:
        end = time.monotonic() + DRAIN_S
        done = self.poll()
        while self._under_way and time.monotonic() < end:
            time.sleep(0.0005)
            done += self.poll()
        return done

    def close(self) -> None:
        over = self._thread.close(DRAIN_S)
        if self._helpers is not None:
            self._helpers.shutdown(wait=over)

    def _run(self, batch: list[tuple[int, Operation]]) -> None:
        for ticket, operation in batch:
            try:
                self._perform(operation)
                ok = True
            except Exception:
                logger.exception("I/O operation %d failed; its blocks are not kept", ticket)
                ok = False
            self._done.append(Completion(ticket, ok))

    def _perform(self, operation: Operation) -> None:
        if self._helpers is None or not isinstance(operation, ScatterRows):
            perform(operation, self._pool, self._snapshots)
            return
        snapshot = self._snapshots[operation.snapshot]
        rows = sum(span.rows for span in operation.spans)
        worth = rows * snapshot.shape[0] * snapshot.shape[2] // _SHARE_BYTES + 1
        own, *others = shares(operation.spans, min(self._threads, worth)) or [[]]
        helped: list[Future[None]] = []
        try:
            for part in others:
                help_ = self._helpers.submit(_scatter, part, snapshot, self._pool)
                helped.append(help_)
            _scatter(own, snapshot, self._pool)
        finally:
            wait(helped)  # the snapshot is used again when this operation is over, failed or not
        for done in helped:
            done.result()
