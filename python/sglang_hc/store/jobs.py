"""Work that the scheduler thread never waits for: jobs with deadlines, done by a thread.

A thread that hangs inside a call cannot be stopped. Its jobs are answered when their deadline
passes, and who asks for new ones can see that it is not back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.workers import Workers


class Job:
    """One operation: answered once, by the thread that does it or by its deadline.

    ticket: see `BlockIo`. deadline: of a job that is done in one call with others it is the latest
    of theirs. lock: held by the thread while it touches the caller's memory; never across a back
    end's call.
    at, blocks: see `BlockDone`.
    """

    def __init__(self, ticket: int, deadline: float) -> None:
        self.ticket = ticket
        self.deadline = deadline
        self.lock = threading.Lock()
        self.outcome: Outcome | None = None
        self.at: float | None = None
        self.blocks = 0

    def done(self, tier: SourceTier) -> BlockDone:
        """The answer, once there is one."""
        assert self.outcome is not None
        return BlockDone(self.ticket, self.outcome, tier.value, self.at, self.blocks)

    def complete(self, outcome: Outcome) -> None:
        """Answer, unless it was answered before."""
        with self.lock:
            if self.outcome is None:
                self.outcome = outcome

    def expire(self, now: float) -> None:
        """Answer TIMED_OUT if the deadline has passed and the thread is not about to answer."""
        if now >= self.deadline and self.outcome is None and self.lock.acquire(blocking=False):
            if self.outcome is None:
                self.outcome = Outcome.TIMED_OUT
            self.lock.release()


class Question(Job):
    """Which blocks are there, or that they go. block_ids: None for all."""

    def __init__(
        self, ticket: int, deadline: float, block_ids: Sequence[bytes] | None, erases: bool = False
    ) -> None:
        super().__init__(ticket, deadline)
        self.block_ids = block_ids
        self.erases = erases


J = TypeVar("J", bound=Job)


class JobThread(Generic[J]):
    """Daemon threads, one as a rule, that take jobs in the order in which they came, up to `most`
    at a time.

    All methods belong to one other thread; none waits except `close`. perform: does a batch on one
    of the threads and settles each job of it; what it leaves unsettled, or raises for, is answered
    IO_ERROR. most: asked before each batch.
    """

    def __init__(
        self,
        name: str,
        perform: Callable[[list[J]], None],
        most: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
        threads: int = 1,
    ) -> None:
        self._perform = perform
        self._clock = clock
        self._jobs: deque[J] = deque()
        self._running: dict[int, float] = {}
        """Deadlines of the batches that are being done, by thread."""
        self._threads: Workers[J] = Workers(name, self._run, most, threads)

    @property
    def stuck(self) -> bool:
        """A thread is still inside a call whose deadline has passed."""
        return self._clock() >= min(self._running.copy().values(), default=float("inf"))

    def submit(self, job: J) -> None:
        self._jobs.append(job)
        self._threads.submit(job)

    def take_done(self) -> list[J]:
        """Jobs that are answered, in the order in which they were submitted."""
        done: list[J] = []
        now = self._clock()
        while self._jobs:
            self._jobs[0].expire(now)
            if self._jobs[0].outcome is None:
                break
            done.append(self._jobs.popleft())
        return done

    def close(self, timeout: float) -> bool:
        """Finish what was submitted; False when that takes longer than `timeout` s."""
        return self._threads.close(timeout)

    def _run(self, taken: list[J]) -> None:
        batch = [job for job in taken if job.outcome is None]
        if not batch:
            return
        last = max(job.deadline for job in batch)
        for job in batch:  # one call does them all: none is there before the last one
            job.deadline = last
        self._running[threading.get_ident()] = last
        try:
            self._perform(batch)
        finally:
            for job in batch:
                job.complete(Outcome.IO_ERROR)
            del self._running[threading.get_ident()]
