"""The disk store as a `LocalBlockIo`: each directory has threads that read and some that write."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import WRITE_QUEUE, BlockDone, SlotRead, SlotWrite
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.store import DiskStore
from sglang_hc.store.host_pool import SlotPool
from sglang_hc.store.jobs import JobThread, Question
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.workers import Workers
from sglang_hc.tree.forgetting import Forgetting

logger = logging.getLogger(__name__)

_Erasing = tuple[int, Forgetting | None]
"""Ticket, and what is erased: some namespaces, or everything."""

READ_THREADS = 3
"""Blocks under way per directory: while one is verified the disk reads others."""

WRITE_THREADS = 2
"""Blocks under way per directory: while one is hashed or gets its name the disk writes another."""


@dataclass(frozen=True)
class Patience:
    """silent_s: how long one piece of work on a disk may take before its directory is out of use
    until it ends: a fraction of it for one that works. close_s: longest that all directories may
    take to finish what was submitted: a write that is too late is not begun."""

    silent_s: float = 30.0
    close_s: float = 45.0


PATIENCE = Patience()


class DiskThreads:
    """Threads of this process. Each directory has its own, so that one that hangs holds up nobody
    but those who wait for its blocks, and those for `Patience.silent_s`.

    counts: gets with each poll what no answer tells. patience: None for PATIENCE. tier: what these
    directories are to the server: REMOTE for the one of `--hc-remote file`.
    """

    has_record = rests = True

    def __init__(
        self,
        store: DiskStore,
        pool: SlotPool,
        counts: Counter[str],
        patience: Patience | None = None,
        tier: SourceTier = SourceTier.DISK,
    ) -> None:
        self.patience = patience or PATIENCE
        self.tier = tier
        self.name = "disk" if tier is SourceTier.DISK else "file"
        self._store = store
        self._pool = pool
        self.capacity = store.capacity
        self.contains, self.touch, self.expect = store.contains, store.touch, store.expect
        self.named = store.named
        self.counts = counts
        self._counted: Counter[str] = Counter()
        self._done: deque[BlockDone] = deque()
        self._questions: JobThread[Question] = JobThread("hc-find", self._find)
        self._erasing: Workers[_Erasing] = Workers("hc-erase", self._erase)
        self._reads: dict[Directory, Workers[SlotRead]] = {}
        self._writes: dict[Directory, Workers[SlotWrite]] = {}
        for directory in store.directories:
            write = partial(self._write, directory)
            self._reads[directory] = Workers("hc-read", self._read, threads=READ_THREADS)
            self._writes[directory] = Workers("hc-write", write, threads=WRITE_THREADS)

    @property
    def is_shared(self) -> bool:
        return bool(self._store.shared_with)

    @property
    def hangs(self) -> bool:
        return not self._store.in_use()

    def changes(self, *, anew: bool = False) -> Mapping[bytes, bool]:
        here = self._store.contains
        return {name: bool(here([name])) for name in self._store.take_changes(anew=anew)}

    def look_up(self, ticket: int, block_ids: Sequence[bytes], deadline: float) -> None:
        """As in `LocalBlockIo`. While one takes too long nothing else is looked up."""
        if self._questions.stuck:
            self.answer(ticket, Outcome.TIMED_OUT)
        else:
            self._questions.submit(Question(ticket, deadline, block_ids))

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> None:
        for directory in self._store.order(block.block_id):
            if len(self._writes[directory]) < max(1, WRITE_QUEUE // len(self._writes)):
                self._writes[directory].submit(SlotWrite(ticket, block, slot, deadline))
                return
        self.answer(ticket, Outcome.DROPPED)

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        directory = self._store.directory_of(block_id)
        if directory is None:
            self.answer(ticket, self._store.absence(block_id))
        else:
            self._reads[directory].submit(SlotRead(ticket, block_id, slot, deadline))

    def poll(self) -> list[BlockDone]:
        self._watch()
        before, self._counted = self._counted, self._store.counters()
        for name, more in (self._counted - before).items():
            self.counts[f"{self.tier.value}_{name}"] += more
        found = [question.done(self.tier) for question in self._questions.take_done()]
        return found + [self._done.popleft() for _ in range(len(self._done))]

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> None:
        self._erasing.submit((ticket, what))

    def levels(self) -> dict[str, int]:
        blocks, directories = len(self._store), len(self._store.in_use())
        if self.tier is SourceTier.REMOTE:
            return {"remote_blocks": blocks}
        return {"disk_blocks": blocks, "disk_directories": directories}

    def close(self) -> None:
        """As in BlockIo, for a while; what hangs is left behind, its directory open."""
        close_s = self.patience.close_s
        if not self._erasing.close(close_s):
            logger.error("sglang-hc: erasing is not over; the directories are left open")
            return
        self._questions.close(close_s)
        directories = self._store.directories
        closing = Workers[Directory]("hc-close", self._close, threads=len(directories))
        for directory in directories:
            closing.submit(directory)
        if not closing.close(close_s):
            logger.error("sglang-hc: a directory does not answer; it is left open")

    def _watch(self) -> None:
        """Directories that hang are out of use, and nobody waits for them."""
        latest = time.monotonic() - self.patience.silent_s
        for directory, reads in self._reads.items():
            writes = self._writes[directory]
            directory.note_hang(min(reads.busy_since, writes.busy_since) < latest)
            if directory.hangs:
                for read in reads.withdraw():
                    self.answer(read.ticket, Outcome.IO_ERROR)
                for write in writes.withdraw():
                    self.answer(write.ticket, Outcome.DROPPED)

    # -- threads ---------------------------------------------------------------------------------

    def answer(self, ticket: int, outcome: Outcome, blocks: int = 0) -> None:
        """Say how an operation ended. Any thread."""
        self._done.append(BlockDone(ticket, outcome, self.tier.value, time.monotonic(), blocks))

    def _find(self, asked: list[Question]) -> None:
        """Others may have stored what is not known here."""
        for question in asked:
            for block_id in question.block_ids or ():
                if not (self._store.contains((block_id,)) or self._store.find(block_id)):
                    break
                question.blocks += 1
            question.complete(Outcome.OK)

    def _erase(self, asked: list[_Erasing]) -> None:
        for ticket, what in asked:
            blocks, complete = 0, False
            try:
                blocks, complete = self._store.erase(what)
            finally:
                self.answer(ticket, Outcome.OK if complete else Outcome.IO_ERROR, blocks)

    def _read(self, batch: list[SlotRead]) -> None:
        for one in batch:
            outcome = Outcome.IO_ERROR
            try:
                into = self._pool.view(one.slot)
                outcome = self._store.read(one.block_id, into, one.deadline)
            finally:
                self.answer(one.ticket, outcome)

    def _write(self, directory: Directory, batch: list[SlotWrite]) -> None:
        for one in batch:
            outcome = Outcome.IO_ERROR
            try:
                outcome = self._write_one(directory, one)
            finally:
                self.answer(one.ticket, outcome)

    def _write_one(self, first: Directory, one: SlotWrite) -> Outcome:
        if one.deadline <= time.monotonic():
            return Outcome.TIMED_OUT
        others = [d for d in self._store.order(one.block.block_id) if d is not first]
        return self._store.write(one.block, self._pool.view(one.slot), [first, *others])

    def _close(self, batch: list[Directory]) -> None:
        for directory in batch:
            self._writes[directory].close()
            self._reads[directory].close()
            self._store.close_directory(directory)
