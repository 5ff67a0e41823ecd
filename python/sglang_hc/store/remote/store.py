"""A remote store as one process uses it: look-ups, reads and writes that threads do meanwhile.

    look_up    one thread asks which blocks are there
    read       threads fetch envelopes into frames, copy to slots, and prove what they copied
    write      threads copy slots into frames, seal and store them

An envelope is what the file of a block would hold in a directory (docs/disk-format.md), without
token ids and label. Every operation is answered by its deadline, even when the back end hangs; then
it gets no new ones until it answers. What is known of the store, and whether it is asked at all, is
decided elsewhere (`store.known_blocks`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import numpy as np

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.disk.format import VERSION, Damaged, StoredModel, check_block, seal_block
from sglang_hc.store.host_pool import SlotPool
from sglang_hc.store.jobs import J, Job, JobThread, Question
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote.backend import Frames, RemoteBackend
from sglang_hc.store.remote.call_size import CallSize
from sglang_hc.tree.forgetting import Forgetting

logger = logging.getLogger(__name__)

CLEAR_S = 60.0
CLOSE_S = 5.0

ROOM_S = 0.05
"""Mooncake makes room when it has refused some blocks; so long after that it is asked again."""

TIER = SourceTier.REMOTE


def storage_key(model: StoredModel, block_id: bytes) -> str:
    """Name of a block in a remote store: format version, model and plan, part, block."""
    return f"hc{VERSION}-{(model.fingerprint + model.part).hex()}-{block_id.hex()}"


class _Read(Job):
    def __init__(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        super().__init__(ticket, deadline)
        self.block_id = block_id
        self.slot = slot
        self.problem: Damaged | None = None


class _Write(Job):
    def __init__(self, ticket: int, block: Block, slot: int, deadline: float) -> None:
        super().__init__(ticket, deadline)
        self.block = replace(block, tokens=b"", namespace="")
        self.slot = slot


_Call = Callable[[list[J], range], None]
"""Moves blocks through these frames, one each."""


class RemoteStore:
    """A `LocalBlockIo` over a back end. Its methods belong to the scheduler thread."""

    tier = TIER
    has_record = rests = False
    is_shared = True
    capacity = 0

    def __init__(
        self,
        backend: RemoteBackend,
        frames: Frames,
        pool: SlotPool,
        model: StoredModel,
        counts: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """frames: with as many calls as the back end may be asked for at a time. model: whose the
        blocks are; what carries another name is never served. counts: gets hangs, and why blocks
        were not served."""
        self.counts, self.name = counts, backend.name
        self._backend = backend
        self._frames = frames
        self._pool = pool
        self._model = model
        self._clock = clock
        self._hung = False
        self._refused: list[BlockDone] = []
        self._read_size, calls = CallSize(frames.call_frames), len(frames.for_loads)
        loads, saves = (lambda: self._read_size.blocks), (lambda: frames.call_frames)
        get = partial(self._move, self._fetch, _free(frames.for_loads))
        put = partial(self._move, self._store, _free(frames.for_saves))
        self._questions = JobThread[Question]("hc-remote-find", self._find, clock=clock)
        self._loads = JobThread[_Read]("hc-remote-get", get, loads, clock, calls)
        self._saves = JobThread[_Write]("hc-remote-put", put, saves, clock, calls)

    @property
    def hangs(self) -> bool:
        return self._questions.stuck or self._loads.stuck or self._saves.stuck

    # -- LocalBlockIo ----------------------------------------------------------------------------

    def contains(self, block_ids: Sequence[bytes]) -> int:
        return 0

    def changes(self, *, anew: bool = False) -> Mapping[bytes, bool]:
        return {}

    def look_up(self, ticket: int, block_ids: Sequence[bytes], deadline: float) -> None:
        if self._questions.stuck or self._loads.stuck:
            self._refuse(ticket, Outcome.TIMED_OUT)
        else:
            self._questions.submit(Question(ticket, deadline, block_ids))

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> None:
        """As in BlockIo, after the look-ups that came before and before those that follow. Single
        blocks: answered DROPPED by a store that can remove none."""
        names, deadline = None if what is None else block_ids, self._clock() + CLEAR_S
        self._questions.submit(Question(ticket, deadline, names, erases=True))

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        if self._questions.stuck or self._loads.stuck:
            self._refuse(ticket, Outcome.TIMED_OUT)
        else:
            self._loads.submit(_Read(ticket, block_id, slot, deadline))

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> None:
        if self._saves.stuck:
            self._refuse(ticket, Outcome.DROPPED)
        else:
            self._saves.submit(_Write(ticket, block, slot, deadline))

    def poll(self) -> list[BlockDone]:
        self._watch()
        done, self._refused = self._refused, []
        loads = self._loads.take_done()
        for job in loads:
            if job.problem is not None and job.problem.reason != Outcome.DAMAGED.value:
                self.counts[f"remote_{job.problem.reason}"] += 1
        ended = [*self._questions.take_done(), *loads, *self._saves.take_done()]
        return done + [job.done(TIER) for job in ended]

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """What leaves the store is the store's own business."""

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """As `touch`."""

    def levels(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Finish what was submitted, for a few seconds at most; a thread that hangs is left
        behind."""
        threads = (self._saves, self._loads, self._questions)
        if all([thread.close(CLOSE_S) for thread in threads]):
            closing = threading.Thread(target=self._backend.close, daemon=True)
            closing.start()
            closing.join(CLOSE_S)

    def _refuse(self, ticket: int, outcome: Outcome) -> None:
        self._refused.append(BlockDone(ticket, outcome, TIER.value))

    def _watch(self) -> None:
        """Say when a thread does not come back from the store, and when it does."""
        if self.hangs != self._hung:
            self._hung = not self._hung
            self.counts["remote_hangs"] += self._hung
            logger.warning(
                "sglang-hc: the remote store (%s) %s", self.name,
                "hangs; it is not asked until it answers" if self._hung else "answers again",
            )  # fmt: skip

    # -- threads ---------------------------------------------------------------------------------

    def _find(self, jobs: list[Question]) -> None:
        for job in jobs:
            keys = [storage_key(self._model, block_id) for block_id in job.block_ids or ()]
            if job.block_ids is None:
                self._backend.clear()
            elif job.erases:
                if not self._backend.delete(keys):
                    job.complete(Outcome.DROPPED)
                job.blocks = len(keys)
            else:
                job.blocks = max(0, min(int(self._backend.exists(keys)), len(keys)))
            job.complete(Outcome.OK)

    def _move(self, by_one_call: _Call[J], free: SimpleQueue[range], jobs: list[J]) -> None:
        """Move blocks through frames that no other call has: a thread that hangs keeps its own. As
        many calls have frames as there are threads."""
        frames = free.get()
        try:
            self._try(by_one_call, frames, jobs)
        finally:
            free.put(frames)

    def _try(self, by_one_call: _Call[J], frames: range, jobs: list[J]) -> None:
        """Move blocks by one call. If it raises, each block whose time is not over is moved by a
        call of its own, so that one which cannot be moved costs no other."""
        try:
            by_one_call(jobs, frames[: len(jobs)])
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    if job.outcome is None:
                        self._try(by_one_call, frames, [job])
            else:
                logger.warning("sglang-hc: the remote store (%s) raised %r", self.name, error)
                jobs[0].complete(Outcome.IO_ERROR)

    def _fetch(self, jobs: list[_Read], frames: range) -> None:
        for frame in frames:
            self._frames.header(frame).fill(0)  # what an earlier read left must not look like news
        keys = [storage_key(self._model, job.block_id) for job in jobs]
        begin = self._clock()
        answers = _one_each(keys, self._backend.get(keys, frames))
        seconds = self._clock() - begin
        ended = [
            self._deliver(job, frame) if good else Outcome.MISSING
            for job, frame, good in zip(jobs, frames, answers, strict=True)
        ]
        for job, outcome in zip(jobs, ended, strict=True):
            job.complete(outcome)  # together: whoever sees one would take the others for unread
        if all(answers):
            self._read_size.observe(len(keys), seconds)

    def _deliver(self, job: _Read, frame: int) -> Outcome:
        """Copy into the slot, if it is still this job's, and prove the bytes that lie there."""
        header, slot = self._frames.header(frame), self._pool.slot(job.slot)
        with job.lock:
            if job.outcome is not None:
                return Outcome.DAMAGED
            np.copyto(slot, self._frames.payload(frame))
            try:
                check_block(header.data, slot.data, job.block_id, self._model)
            except Damaged as problem:
                job.problem = problem
            job.at = time.monotonic()
        return Outcome.OK if job.problem is None else Outcome.DAMAGED

    def _store(self, jobs: list[_Write], frames: range) -> None:
        ready: list[tuple[_Write, int]] = []
        for job, frame in zip(jobs, frames, strict=True):
            header, payload = self._frames.header(frame), self._frames.payload(frame)
            with job.lock:
                if job.outcome is not None:
                    continue  # the slot is no longer this job's
                np.copyto(payload, self._pool.slot(job.slot))
            now = time.time_ns() // 1000
            seal_block(header.data, payload.data, job.block, self._model, now)
            ready.append((job, frame))
        refused, before = self._put(ready), len(ready) + 1
        while 0 < len(refused) < before:  # once more, and as long as that helps
            time.sleep(ROOM_S)
            wanted = [one for one in refused if one[0].outcome is None]  # the others are over
            refused, before = self._put(wanted), len(refused)
        for job, _ in refused:
            job.complete(Outcome.IO_ERROR)

    def _put(self, ready: list[tuple[_Write, int]]) -> list[tuple[_Write, int]]:
        """Store blocks that lie in these frames. Returns those that the store refused."""
        keys = [storage_key(self._model, job.block.block_id) for job, _ in ready]
        if not keys:
            return []
        answers = _one_each(keys, self._backend.put(keys, [frame for _, frame in ready]))
        for (job, _), good in zip(ready, answers, strict=True):
            if good:
                job.complete(Outcome.OK)
        return [one for one, good in zip(ready, answers, strict=True) if not good]


def _free(parts: Sequence[range]) -> SimpleQueue[range]:
    """Frames that no call has, in parts of one call."""
    free: SimpleQueue[range] = SimpleQueue()
    for part in parts:
        free.put(part)
    return free


def _one_each(keys: Sequence[str], answers: Sequence[bool]) -> list[bool]:
    """The answers, if there is one per key. Raises ValueError before any of them is believed."""
    given = list(answers)
    if len(given) != len(keys):
        raise ValueError(f"{len(given)} answers for {len(keys)} keys")
    return given
