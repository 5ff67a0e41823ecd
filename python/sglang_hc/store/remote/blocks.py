"""Blocks in a remote store: a `BlockIo` whose lookups, reads and writes happen behind its back.

    contains   answers from what is known
    ask        what is not known is looked up by one thread
    read       one thread fetches envelopes into frames, copies to slots, and proves what it copied
    write      one thread copies slots into frames, seals and stores them; beyond a bound a save is
               dropped

A store that raises, hangs, or hands out bytes that are not the block is a miss and a counter. One
that keeps failing, or hangs, is left alone for a while; the log says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.circuit_breaker import CircuitBreaker
from sglang_hc.store.disk import Block
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote.backend import Frames, RemoteBackend
from sglang_hc.store.remote.envelope import Verdict, inspect, seal, storage_key
from sglang_hc.store.remote.jobs import Job, JobThread
from sglang_hc.store.remote.presence_cache import Presence, PresenceCache

logger = logging.getLogger(__name__)

SAVE_QUEUE = 64
"""Blocks that may wait to be stored; a write beyond it is refused."""

LOOKUP_QUEUE = 256
"""Questions that may be open; beyond it a block counts as absent."""

LOOKUP_S = 2.0
"""Longest that a request may wait for the answer to a question; as a rule a round trip."""

CLEAR_S = 60.0
CLOSE_S = 5.0

TIER = "remote"

_AFTER = {
    Outcome.MISSING: Presence.ABSENT,
    Outcome.TIMED_OUT: Presence.ABSENT,
    Outcome.DAMAGED: Presence.USELESS,
    Outcome.IO_ERROR: Presence.USELESS,
}
"""What a failed read says about the block."""


class _Lookup(Job):
    def __init__(self, deadline: float, identities: Sequence[bytes]) -> None:
        super().__init__(deadline)
        self.identities = identities
        self.count = 0


class _Clear(_Lookup):
    """Travels with the lookups, so that none that follows sees what was there before."""


class _Transfer(Job):
    def __init__(self, deadline: float, ticket: int, identity: bytes, slot: int) -> None:
        super().__init__(deadline)
        self.ticket = ticket
        self.identity = identity
        self.slot = slot
        self.verdict = Verdict.INTACT


class RemoteBlocks:
    """See the module, and `BlockIo` for the contract. Belongs to the scheduler thread."""

    capacity = 0

    def __init__(
        self,
        backend: RemoteBackend,
        frames: Frames,
        pool: HostPool,
        fingerprint: bytes,
        counts: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """counts: gets the questions, what became of them, and why blocks were not served."""
        self._backend = backend
        self._frames = frames
        self._pool = pool
        self._fingerprint = fingerprint
        self._clock = clock
        self._presence = PresenceCache(clock)
        self._asked: set[bytes] = set()
        self._answers: list[BlockDone] = []
        self._cleared = True
        self._hangs = False
        self._reads, self._writes = CircuitBreaker(clock), CircuitBreaker(clock)
        self.counts = counts
        loads, saves = len(frames.for_loads), len(frames.for_saves)
        self._lookups: JobThread[_Lookup] = JobThread(
            "hc-remote-find", self._find, 1, LOOKUP_QUEUE, clock
        )
        self._loads: JobThread[_Transfer] = JobThread(
            "hc-remote-get", self._get, loads, clock=clock
        )
        self._saves: JobThread[_Transfer] = JobThread(
            "hc-remote-put", self._put, saves, SAVE_QUEUE, clock
        )

    @property
    def name(self) -> str:
        """The back end's, for people."""
        return self._backend.name

    # -- BlockIo ---------------------------------------------------------------------------------

    def contains(self, block_ids: Sequence[bytes]) -> int:
        return self._presence.leading(block_ids) if self._readable else 0

    def sources(self, block_ids: Sequence[bytes]) -> list[SourceTier]:
        return [SourceTier.REMOTE] * len(block_ids)

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        """As in BlockIo; an answer is on its way for at most LOOKUP_S."""
        if not self._readable:
            return False
        found = self._presence.leading(block_ids)
        if found == len(block_ids):
            return False
        first = block_ids[found]
        if self._presence.state(first) is None and first not in self._asked:
            self._look_up(block_ids[found:])
        return first in self._asked

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        job = _Transfer(deadline, ticket, block_id, slot)
        if self._readable:
            self._loads.submit(job)
        else:
            self._at_once(job, Outcome.MISSING)

    def wants(self, block_id: bytes) -> bool:
        return self._presence.state(block_id) not in (Presence.PRESENT, Presence.USELESS)

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        """As in BlockIo, but never refused: a write that would wait too long is answered DROPPED,
        so that the reason is counted."""
        job = _Transfer(deadline, ticket, block.block_id, slot)
        if not self.wants(job.identity):
            self._at_once(job, Outcome.DUPLICATE)
        elif self._saves.full or not self._writable:
            self._at_once(job, Outcome.DROPPED)
        else:
            self._saves.submit(job)
        return True

    def flush(self) -> None:
        """The threads begin at once."""

    def poll(self) -> list[BlockDone]:
        self._watch()
        for lookup in self._lookups.take_done():
            self._answered(lookup)
        done, self._answers = self._answers, []
        done += [self._loaded(job) for job in self._loads.take_done()]
        done += [self._saved(job) for job in self._saves.take_done()]
        return done

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """What leaves the store is the store's own business."""

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """As `touch`."""

    def clear(self) -> None:
        """Empty the store, of everybody's blocks, as SGLang's own tiers do. Nothing is looked up
        until that is through; if it fails, until a restart."""
        self._cleared = False
        self._lookups.submit(_Clear(self._clock() + CLEAR_S, ()))

    def levels(self) -> dict[str, int]:
        """Whether the store is asked at present."""
        return {"remote_usable": int(self._readable and self._writable)}

    def close(self) -> None:
        """Finish what was submitted, for at most CLOSE_S; a thread that hangs is left behind."""
        threads = (self._saves, self._loads, self._lookups)
        if all([thread.close(CLOSE_S) for thread in threads]):
            closing = threading.Thread(target=self._backend.close, daemon=True)
            closing.start()
            closing.join(CLOSE_S)

    # -- scheduler thread ------------------------------------------------------------------------

    @property
    def _readable(self) -> bool:
        stuck = self._lookups.stuck or self._loads.stuck
        return self._cleared and not stuck and self._reads.allows()

    def _at_once(self, job: _Transfer, outcome: Outcome) -> None:
        """Answer what the threads are not asked for; it must not wait behind what they are."""
        self._answers.append(BlockDone(job.ticket, outcome, TIER))

    @property
    def _writable(self) -> bool:
        return not self._saves.stuck and self._writes.allows()

    def _look_up(self, identities: Sequence[bytes]) -> None:
        if self._lookups.full:
            self.counts["remote_lookup_dropped"] += 1
            self._presence.note(identities[0], Presence.ABSENT)
            return
        self._asked.update(identities)
        self._lookups.submit(_Lookup(self._clock() + LOOKUP_S, identities))
        self.counts["remote_lookups"] += 1

    def _answered(self, lookup: _Lookup) -> None:
        good = lookup.outcome is Outcome.OK
        if isinstance(lookup, _Clear):
            self._presence.clear()
            self._cleared = good
            return
        self._asked.difference_update(lookup.identities)
        self._judge(self._reads, lookup.outcome, "lookups and reads")
        if not good and lookup.outcome is not None:
            self.counts[f"remote_lookup_{lookup.outcome.value}"] += 1
        count = lookup.count if good else 0
        for identity in lookup.identities[:count]:
            self._presence.note(identity, Presence.PRESENT)
        for identity in lookup.identities[count : count + 1]:
            self._presence.note(identity, Presence.ABSENT)

    def _loaded(self, job: _Transfer) -> BlockDone:
        outcome = job.outcome
        assert outcome is not None
        if outcome is not Outcome.OK:
            self._presence.note(job.identity, _AFTER[outcome])
        if job.verdict in (Verdict.FOREIGN, Verdict.UNKNOWN_VERSION):
            self.counts[f"remote_{job.verdict.value}"] += 1
        self._judge(self._reads, outcome, "lookups and reads")
        return BlockDone(job.ticket, outcome, TIER, job.at)

    def _saved(self, job: _Transfer) -> BlockDone:
        outcome = job.outcome
        assert outcome is not None
        if outcome is Outcome.OK:
            self._presence.note(job.identity, Presence.PRESENT)
        self._judge(self._writes, outcome, "saves")
        return BlockDone(job.ticket, outcome, TIER)

    def _judge(self, breaker: CircuitBreaker, outcome: Outcome | None, what: str) -> None:
        """Note what an answer says about the store's health; make a pause when it keeps failing."""
        if outcome in (Outcome.OK, Outcome.MISSING):
            breaker.succeeded()
        elif outcome in (Outcome.IO_ERROR, Outcome.TIMED_OUT) and breaker.failed():
            self.counts["remote_pauses"] += 1
            logger.warning(
                "sglang-hc: the remote store (%s) keeps failing; %s are off for a while",
                self.name,
                what,
            )

    def _watch(self) -> None:
        """Say when a thread does not come back from the store, and when it does."""
        hangs = self._lookups.stuck or self._loads.stuck or self._saves.stuck
        if hangs != self._hangs:
            self._hangs = hangs
            self.counts["remote_hangs"] += hangs
            logger.warning(
                "sglang-hc: the remote store (%s) %s", self.name,
                "hangs; it is not asked until it answers" if hangs else "answers again",
            )  # fmt: skip

    # -- threads ---------------------------------------------------------------------------------

    def _key(self, identity: bytes) -> str:
        return storage_key(self._fingerprint, identity)

    def _find(self, jobs: list[_Lookup]) -> None:
        for job in jobs:
            if isinstance(job, _Clear):
                self._backend.clear()
            else:
                keys = [self._key(identity) for identity in job.identities]
                job.count = max(0, min(int(self._backend.exists(keys)), len(keys)))
            job.settle(Outcome.OK)

    def _get(self, jobs: list[_Transfer]) -> None:
        self._move(self._fetch, jobs)

    def _put(self, jobs: list[_Transfer]) -> None:
        self._move(self._store, jobs)

    def _move(self, by_one_call: Callable[[list[_Transfer]], None], jobs: list[_Transfer]) -> None:
        """Move blocks by one call. If it raises, each block is moved by a call of its own, so that
        one which cannot be moved costs no other."""
        try:
            by_one_call(jobs)
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._move(by_one_call, [job])
            else:
                logger.warning("sglang-hc: the remote store (%s) raised %r", self.name, error)
                jobs[0].settle(Outcome.IO_ERROR)

    def _fetch(self, jobs: list[_Transfer]) -> None:
        frames = self._frames.for_loads[: len(jobs)]
        for frame in frames:
            self._frames.header(frame).fill(0)  # what an earlier read left must not look like news
        keys = [self._key(job.identity) for job in jobs]
        answers = _one_each(keys, self._backend.get(keys, frames))
        for job, frame, good in zip(jobs, frames, answers, strict=True):
            if good:
                self._deliver(job, frame)
            else:
                job.settle(Outcome.MISSING)

    def _deliver(self, job: _Transfer, frame: int) -> None:
        """Copy into the slot, if it is still this job's, and prove the bytes that lie there."""
        slot = self._pool.slot(job.slot)
        with job.lock:
            if job.outcome is None:
                np.copyto(slot, self._frames.payload(frame))
                header = self._frames.header(frame)
                job.verdict = inspect(header, slot, self._fingerprint, job.identity)
                intact = job.verdict is Verdict.INTACT
                job.at = time.monotonic()
                job.outcome = Outcome.OK if intact else Outcome.DAMAGED

    def _store(self, jobs: list[_Transfer]) -> None:
        ready: list[tuple[_Transfer, int]] = []
        for job, frame in zip(jobs, self._frames.for_saves, strict=False):
            with job.lock:
                if job.outcome is not None:
                    continue  # the slot is no longer this job's
                np.copyto(self._frames.payload(frame), self._pool.slot(job.slot))
            now = time.time_ns() // 1000
            seal(self._frames.bytes[frame], self._fingerprint, job.identity, now)
            ready.append((job, frame))
        keys = [self._key(job.identity) for job, _ in ready]
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
