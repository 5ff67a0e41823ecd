"""The disk store behind `BlockIo`: threads of each directory write in batches and read in runs."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block_io import WRITE_QUEUE, BlockDone, Layers, SlotRead, SlotWrite
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.reader import RUN_BYTES, Read
from sglang_hc.store.disk.store import DiskStore
from sglang_hc.store.disk.writer import Block
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.workers import Workers
from sglang_hc.tree.forgetting import Forgetting

logger = logging.getLogger(__name__)

_Erasing = tuple[int, Forgetting | Mapping[Directory, Mapping[bytes, int]]]
"""Ticket, and what is erased: some namespaces, or all that was forgotten."""

READ_THREADS = 2
"""Runs of blocks under way per directory: while one is verified the disk reads another."""

WRITE_THREADS = 2
"""Batches under way per directory, so that while one is hashed, synced or made visible the disk
has the bytes of another to write."""

BATCH_BLOCKS = 32
BATCH_BYTES = 64 << 20
"""Most that one sync covers, so that a slow disk gives signs of life and gives pins back."""


SILENT_S = 30.0
"""How long one piece of work on a disk may take before its directory is out of use until it ends:
a fraction of it for one that works."""

CLOSE_S = 45.0
"""Longest that all directories may take to finish what was submitted: a write that is too late is
not begun."""


class DiskThreads:
    """BlockIo on threads of this process. Each directory has its own, so that one that hangs holds
    up nobody but those who wait for its blocks, and those for SILENT_S.

    counts: gets with each poll what no answer tells. on_done: called on a thread of this class
    after each answer, for whoever sleeps until then.
    """

    name = "disk"

    def __init__(
        self,
        store: DiskStore,
        pool: HostPool,
        counts: Counter[str],
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._pool = pool
        self.counts = counts
        self._counted: Counter[str] = Counter()
        self._on_done = on_done
        self._done: deque[BlockDone] = deque()
        self._has_named = False
        batch = max(1, min(BATCH_BLOCKS, BATCH_BYTES // store.slot_bytes))
        run = max(1, RUN_BYTES // store.slot_bytes)
        self._erasing: Workers[_Erasing] = Workers("hc-erase", self._erase)
        self._reads: dict[Directory, Workers[SlotRead]] = {}
        self._writes: dict[Directory, Workers[tuple[int, SlotWrite]]] = {}
        """With how often the store had been cleared."""
        for directory in store.directories:
            write = partial(self._write, directory)
            self._reads[directory] = Workers("hc-read", self._read, lambda: run, READ_THREADS)
            self._writes[directory] = Workers("hc-write", write, lambda: batch, WRITE_THREADS)

    @property
    def capacity(self) -> int:
        return self._store.capacity

    def contains(self, block_ids: Sequence[bytes]) -> int:
        return self._store.contains(block_ids)

    def sources(self, block_ids: Sequence[bytes]) -> list[SourceTier]:
        return [SourceTier.DISK] * len(block_ids)

    def changes(self) -> Mapping[bytes, bool]:
        back, lost = self._store.take_directory_changes()
        gone = [*lost, *self._store.drain_removed()]
        if not self._has_named:
            self._has_named, back = True, self._store.block_ids()
        here = self._store.contains
        return dict.fromkeys(back, True) | {name: bool(here([name])) for name in gone}

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        return False

    def wants(self, block_id: bytes) -> bool:
        return not self._store.contains((block_id,))

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        for directory in self._store.order():
            if len(self._writes[directory]) < max(1, WRITE_QUEUE // len(self._writes)):
                write = SlotWrite(ticket, block, slot, deadline)
                self._writes[directory].submit((self._store.clearings, write))
                return True
        return False

    def read(
        self, ticket: int, block_id: bytes, slot: int, deadline: float, layers: Layers = None
    ) -> None:
        """As `OwnDisk.read`."""
        directory = self._store.directory_of(block_id)
        if directory is None:
            self.answer(ticket, self._store.absence(block_id))
        else:
            self._reads[directory].submit(SlotRead(ticket, block_id, slot, deadline, layers))

    def flush(self) -> None:
        """Threads begin at once."""

    def poll(self) -> list[BlockDone]:
        self._watch()
        before, self._counted = self._counted, self._store.counters()
        for name, more in (self._counted - before).items():
            self.counts[f"disk_{name}"] += more
        return [self._done.popleft() for _ in range(len(self._done))]

    def touch(self, block_ids: Sequence[bytes]) -> None:
        self._store.touch(block_ids)

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        self._store.expect(uses)

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> int:
        """As in BlockIo; what is erased is not found from now on where it is everything."""
        self._erasing.submit((ticket, self._store.forget_all() if what is None else what))
        return 1

    def levels(self) -> dict[str, int]:
        store = self._store
        return {"disk_blocks": len(store), "disk_directories": len(store.in_use())}

    def close(self) -> None:
        """As in BlockIo, for at most CLOSE_S; what hangs is left behind, its directory locked."""
        if not self._erasing.close(CLOSE_S):
            logger.error("sglang-hc: erasing is not over; the directories are left open")
            return
        directories = self._store.directories
        closing = Workers[Directory]("hc-close", self._close, threads=len(directories))
        for directory in directories:
            closing.submit(directory)
        if not closing.close(CLOSE_S):
            logger.error("sglang-hc: a directory does not answer; it is left open")

    def _watch(self) -> None:
        """Directories that hang are out of use, and nobody waits for them."""
        latest = time.monotonic() - SILENT_S
        for directory, reads in self._reads.items():
            writes = self._writes[directory]
            directory.note_hang(min(reads.busy_since, writes.busy_since) < latest)
            if directory.hangs:
                for read in reads.withdraw():
                    self.answer(read.ticket, Outcome.IO_ERROR)
                for _, write in writes.withdraw():
                    self.answer(write.ticket, Outcome.DROPPED)

    # -- threads ---------------------------------------------------------------------------------

    def answer(self, ticket: int, outcome: Outcome, blocks: int = 0) -> None:
        """Say how an operation ended. Any thread."""
        self._done.append(BlockDone(ticket, outcome, "disk", time.monotonic(), blocks))
        self._on_done()

    def _erase(self, asked: list[_Erasing]) -> None:
        for ticket, what in asked:
            blocks, complete = 0, False
            try:
                if isinstance(what, Forgetting):
                    blocks, complete = self._store.erase(what)
                else:
                    blocks, complete = self._store.erase_all(what)
            finally:
                self.answer(ticket, Outcome.OK if complete else Outcome.IO_ERROR, blocks)

    def _read(self, batch: list[SlotRead]) -> None:
        reads = [
            Read(one.block_id, self._pool.view(one.slot), one.layers, one.deadline) for one in batch
        ]
        self._answer_all(batch, lambda: self._store.read_many(reads))

    def _write(self, directory: Directory, batch: list[tuple[int, SlotWrite]]) -> None:
        now, clearings = time.monotonic(), self._store.clearings
        fresh: list[SlotWrite] = []
        for asked, move in batch:
            if asked != clearings:
                self.answer(move.ticket, Outcome.DROPPED)
            elif move.deadline <= now:
                self.answer(move.ticket, Outcome.TIMED_OUT)
            else:
                fresh.append(move)
        items = [(move.block, self._pool.view(move.slot)) for move in fresh]
        self._answer_all(fresh, lambda: self._store.write_many(items, directory, clearings))

    def _close(self, batch: list[Directory]) -> None:
        for directory in batch:
            self._writes[directory].close()
            self._reads[directory].close()
            self._store.close_directory(directory)

    def _answer_all(
        self, batch: Sequence[SlotRead | SlotWrite], work: Callable[[], Sequence[Outcome]]
    ) -> None:
        """Do the work of a batch; whatever happens, each of it gets an answer."""
        outcomes: Sequence[Outcome] = [Outcome.IO_ERROR] * len(batch)
        try:
            outcomes = work()
        finally:
            for move, outcome in zip(batch, outcomes, strict=True):
                self.answer(move.ticket, outcome)
