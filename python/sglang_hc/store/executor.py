"""The I/O executor: bulk work off the scheduler thread behind submit and poll.

Operations run in the order they were submitted. A completion says that every byte the operation
writes is in place. An operation that fails is reported, never raised: its slots must not be served.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sglang_hc.store.host_pool import HostPool, SnapshotBuffer

logger = logging.getLogger(__name__)


class RowSpan(NamedTuple):
    """`rows` consecutive rows of a snapshot that go to consecutive rows of one slot."""

    source_row: int
    slot: int
    slot_row: int
    rows: int


@dataclass(frozen=True)
class FileRows:
    """Scatter rows of a snapshot buffer into slots: hidden layers, KV layers, what it holds."""

    buffer: int
    spans: tuple[RowSpan, ...]


@dataclass(frozen=True)
class CopyRows:
    """Copy the hidden states of the first `rows` tokens of one slot to another."""

    source: int
    target: int
    rows: int


Operation = FileRows | CopyRows


class Completion(NamedTuple):
    ticket: int
    ok: bool


class Executor(Protocol):
    """Runs operations elsewhere. `submit` and `poll` never wait and belong to one thread."""

    def submit(self, operation: Operation) -> int:
        """Queue an operation. Tickets count up from 1 in submission order."""

    def poll(self) -> list[Completion]:
        """Completions since the last call, in ticket order."""

    def drain(self) -> list[Completion]:
        """Wait until everything submitted has completed; for flushes and tests."""

    def levels(self) -> dict[str, int]:
        """Numbers that go up and down, by the name under which they are shown."""

    def counts(self) -> Counter[str]:
        """Numbers that only grow."""

    def close(self) -> None:
        """Finish what is queued and stop."""


def perform(operation: Operation, pool: HostPool, buffers: list[SnapshotBuffer]) -> None:
    """Carry out one operation on the calling thread."""
    if isinstance(operation, CopyRows):
        pool.copy_rows(operation.source, operation.target, operation.rows)
        return
    buffer = buffers[operation.buffer]
    pairs = [(buffer.hidden, pool.hidden), *zip(buffer.kv, pool.kv, strict=True)]
    for rows, slots in pairs:
        if not rows.shape[0]:
            continue
        for source, slot, target, count in operation.spans:
            slots[slot, :, target : target + count] = rows[:, source : source + count]


class ThreadExecutor:
    """Executor on one thread of this process.

    on_done: called on that thread after each completion, for whoever sleeps until then.
    """

    def __init__(
        self,
        pool: HostPool,
        buffers: list[SnapshotBuffer],
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = pool
        self._buffers = buffers
        self._on_done = on_done
        self._submitted = 0
        self._completed = 0
        self._work: queue.SimpleQueue[tuple[int, Operation] | None] = queue.SimpleQueue()
        self._done: deque[Completion] = deque()
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hc-io", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation) -> int:
        self._submitted += 1
        self._work.put((self._submitted, operation))
        return self._submitted

    def poll(self) -> list[Completion]:
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def drain(self) -> list[Completion]:
        with self._progress:
            self._progress.wait_for(lambda: self._completed == self._submitted)
        return self.poll()

    def levels(self) -> dict[str, int]:
        return {}

    def counts(self) -> Counter[str]:
        return Counter()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            ticket, operation = item
            try:
                perform(operation, self._pool, self._buffers)
                ok = True
            except Exception:
                logger.exception("I/O operation %d failed; its blocks are not kept", ticket)
                ok = False
            self._done.append(Completion(ticket, ok))
            with self._progress:
                self._completed = ticket
                self._progress.notify_all()
            self._on_done()
