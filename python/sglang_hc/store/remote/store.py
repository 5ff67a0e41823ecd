"""A remote store as one process uses it: look-ups, reads and writes that threads do meanwhile.

    look_up    one thread asks which blocks are there
    read       one thread fetches envelopes into frames, copies to slots, and proves what it copied
    write      one thread copies slots into frames, seals and stores them

Every operation is answered by its deadline, even when the back end hangs; then it gets no new ones
until it answers. What is known of the store, and whether it is asked at all, is decided elsewhere
(`store.remote.blocks`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote.backend import Frames, RemoteBackend
from sglang_hc.store.remote.call_size import CallSize
from sglang_hc.store.remote.envelope import Verdict, fingerprint_of_key, inspect, seal, storage_key
from sglang_hc.store.remote.jobs import Job, JobThread

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
TIER = "remote"


class Found(NamedTuple):
    """Answer to a look-up: how many of the first identities are there. Or to `erase`: how many of
    the blocks that it names are not there any more."""

    ticket: int
    outcome: Outcome
    leading: int


class StoreIo(Protocol):
    """Operations on a remote store, each with a ticket and a deadline as in `BlockIo`. No method
    waits except `close`. Tickets of look-ups and of transfers are counted apart."""

    @property
    def name(self) -> str:
        """The back end's, for people."""

    @property
    def hangs(self) -> bool:
        """A call of this process has not come back from the store in time, and nothing is asked of
        it until it does. For people; decisions go by the answers."""

    def look_up(self, ticket: int, block_ids: Sequence[bytes], deadline: float) -> None:
        """Ask how many of the first identities are there without a gap."""

    def erase(self, ticket: int, block_ids: Sequence[bytes] | None, deadline: float) -> None:
        """Remove these blocks, or everybody's for None, after the look-ups that came before and
        before those that follow. Answered DROPPED by a store that can remove no single block."""

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None: ...

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        """Always taken: True, as `BlockIo.write` says it."""

    def found(self) -> list[Found]:
        """Look-ups and erasures that are over since the last call."""

    def poll(self) -> list[BlockDone]:
        """Reads and writes that are over since the last call."""

    def close(self) -> None:
        """Finish what was submitted, for a few seconds at most; a thread that hangs is left
        behind."""


class _Question(Job):
    def __init__(
        self, ticket: int, deadline: float, block_ids: Sequence[bytes] | None, erases: bool = False
    ) -> None:
        """block_ids: None for all that the store has, which are only erased."""
        super().__init__(deadline)
        self.ticket = ticket
        self.block_ids = block_ids
        self.erases = erases
        self.count = 0


class _Transfer(Job):
    def __init__(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        super().__init__(deadline)
        self.ticket = ticket
        self.block_id = block_id
        self.slot = slot
        self.verdict = Verdict.INTACT

    @property
    def done(self) -> BlockDone:
        assert self.outcome is not None
        return BlockDone(self.ticket, self.outcome, TIER, self.at)


class RemoteStore:
    """A `StoreIo` over a back end. Its methods belong to the scheduler thread."""

    def __init__(
        self,
        backend: RemoteBackend,
        frames: Frames,
        pool: HostPool,
        fingerprint: bytes,
        counts: Counter[str],
        clock: Callable[[], float] = time.monotonic,
        key: bytes | None = None,
    ) -> None:
        """fingerprint: of whom the blocks are for; what carries another one is never served.
        counts: gets hangs, and why blocks were not served. key: of their MACs (`mac_key`); None for
        none."""
        self._backend = backend
        self._frames = frames
        self._pool = pool
        self._fingerprint = fingerprint_of_key(fingerprint, key)
        self._mac_key = key
        self._counts = counts
        self._clock = clock
        self._hung = False
        self._refused: list[BlockDone] = []
        self._unasked: list[Found] = []
        get, put = partial(self._move, self._fetch), partial(self._move, self._store)
        self._read_size = CallSize(len(frames.for_loads))
        loads, saves = (lambda: self._read_size.blocks), (lambda: len(frames.for_saves))
        self._questions = JobThread[_Question]("hc-remote-find", self._find, clock=clock)
        self._loads = JobThread[_Transfer]("hc-remote-get", get, loads, clock)
        self._saves = JobThread[_Transfer]("hc-remote-put", put, saves, clock)

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def hangs(self) -> bool:
        return self._questions.stuck or self._loads.stuck or self._saves.stuck

    # -- StoreIo ---------------------------------------------------------------------------------

    def look_up(self, ticket: int, block_ids: Sequence[bytes], deadline: float) -> None:
        if self._questions.stuck or self._loads.stuck:
            self._unasked.append(Found(ticket, Outcome.TIMED_OUT, 0))
        else:
            self._questions.submit(_Question(ticket, deadline, block_ids))

    def erase(self, ticket: int, block_ids: Sequence[bytes] | None, deadline: float) -> None:
        self._questions.submit(_Question(ticket, deadline, block_ids, erases=True))

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        if self._questions.stuck or self._loads.stuck:
            self._refused.append(BlockDone(ticket, Outcome.TIMED_OUT, TIER))
        else:
            self._loads.submit(_Transfer(ticket, block_id, slot, deadline))

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        if self._saves.stuck:
            self._refused.append(BlockDone(ticket, Outcome.DROPPED, TIER))
        else:
            self._saves.submit(_Transfer(ticket, block.block_id, slot, deadline))
        return True

    def found(self) -> list[Found]:
        found, self._unasked = self._unasked, []
        for job in self._questions.take_done():
            assert job.outcome is not None
            found.append(Found(job.ticket, job.outcome, job.count))
        return found

    def poll(self) -> list[BlockDone]:
        self._watch()
        done, self._refused = self._refused, []
        for job in self._loads.take_done():
            if job.verdict not in (Verdict.INTACT, Verdict.DAMAGED):
                self._counts[f"remote_{job.verdict.value}"] += 1
            done.append(job.done)
        return done + [job.done for job in self._saves.take_done()]

    def close(self) -> None:
        threads = (self._saves, self._loads, self._questions)
        if all([thread.close(CLOSE_S) for thread in threads]):
            closing = threading.Thread(target=self._backend.close, daemon=True)
            closing.start()
            closing.join(CLOSE_S)

    def _watch(self) -> None:
        """Say when a thread does not come back from the store, and when it does."""
        if self.hangs != self._hung:
            self._hung = not self._hung
            self._counts["remote_hangs"] += self._hung
            logger.warning(
                "sglang-hc: the remote store (%s) %s", self.name,
                "hangs; it is not asked until it answers" if self._hung else "answers again",
            )  # fmt: skip

    # -- threads ---------------------------------------------------------------------------------

    def _key(self, block_id: bytes) -> str:
        return storage_key(self._fingerprint, block_id)

    def _find(self, jobs: list[_Question]) -> None:
        for job in jobs:
            keys = [self._key(block_id) for block_id in job.block_ids or ()]
            if job.block_ids is None:
                self._backend.clear()
            elif job.erases:
                if not self._backend.delete(keys):
                    job.settle(Outcome.DROPPED)
                job.count = len(keys)
            else:
                job.count = max(0, min(int(self._backend.exists(keys)), len(keys)))
            job.settle(Outcome.OK)

    def _move(self, by_one_call: Callable[[list[_Transfer]], None], jobs: list[_Transfer]) -> None:
        """Move blocks by one call. If it raises, each block whose time is not over is moved by a
        call of its own, so that one which cannot be moved costs no other."""
        try:
            by_one_call(jobs)
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    if job.outcome is None:
                        self._move(by_one_call, [job])
            else:
                logger.warning("sglang-hc: the remote store (%s) raised %r", self.name, error)
                jobs[0].settle(Outcome.IO_ERROR)

    def _fetch(self, jobs: list[_Transfer]) -> None:
        frames = self._frames.for_loads[: len(jobs)]
        for frame in frames:
            self._frames.header(frame).fill(0)  # what an earlier read left must not look like news
        keys = [self._key(job.block_id) for job in jobs]
        begin = self._clock()
        answers = _one_each(keys, self._backend.get(keys, frames))
        seconds = self._clock() - begin
        ended = [
            self._deliver(job, frame) if good else Outcome.MISSING
            for job, frame, good in zip(jobs, frames, answers, strict=True)
        ]
        for job, outcome in zip(jobs, ended, strict=True):
            job.settle(outcome)  # together: whoever sees one would take the others for unread
        if all(answers):
            self._read_size.observe(len(keys), seconds)

    def _deliver(self, job: _Transfer, frame: int) -> Outcome:
        """Copy into the slot, if it is still this job's, and prove the bytes that lie there."""
        slot = self._pool.slot(job.slot)
        with job.lock:
            if job.outcome is None:
                np.copyto(slot, self._frames.payload(frame))
                header = self._frames.header(frame)
                job.verdict = inspect(header, slot, self._fingerprint, job.block_id, self._mac_key)
                job.at = time.monotonic()
        return Outcome.OK if job.verdict is Verdict.INTACT else Outcome.DAMAGED

    def _store(self, jobs: list[_Transfer]) -> None:
        ready: list[tuple[_Transfer, int]] = []
        for job, frame in zip(jobs, self._frames.for_saves, strict=False):
            with job.lock:
                if job.outcome is not None:
                    continue  # the slot is no longer this job's
                np.copyto(self._frames.payload(frame), self._pool.slot(job.slot))
            now = time.time_ns() // 1000
            seal(self._frames.bytes[frame], self._fingerprint, job.block_id, now, self._mac_key)
            ready.append((job, frame))
        keys = [self._key(job.block_id) for job, _ in ready]
        if not ready:
            return
        answers = _one_each(keys, self._backend.put(keys, [frame for _, frame in ready]))
        for (job, _), good in zip(ready, answers, strict=True):
            job.settle(Outcome.OK if good else Outcome.IO_ERROR)


def _one_each(keys: Sequence[str], answers: Sequence[bool]) -> list[bool]:
    """The answers, if there is one per key. Raises ValueError before any of them is believed."""
    given = list(answers)
    if len(given) != len(keys):
        raise ValueError(f"{len(given)} answers for {len(keys)} keys")
    return given
