"""Where blocks go below the host tier: submit reads and writes of whole slots, poll what is done.

One narrow interface, so that a disk, a remote store, a chain of both, or a process that holds them
look the same to whoever owns the slots. An operation that fails is answered, never raised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, Protocol

from sglang_hc.store.disk import Block, DiskStore
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)

WRITE_QUEUE = 256
"""Blocks that may wait to be written; a write beyond it is refused."""

READ_THREADS = 4
"""Reads under way per directory."""

WRITE_THREADS = 2
"""Batches under way per directory, so that while one is hashed, synced or made visible the disk
has the bytes of another to write."""

BATCH_BLOCKS = 32
BATCH_BYTES = 64 << 20
"""Most that one sync covers, so that a slow disk gives signs of life and gives pins back."""


class BlockDone(NamedTuple):
    """Answer to one operation, under the ticket that its caller gave it.

    tier: which tier served or took the block, `disk` or `remote`. at: when it was done, on
    `time.monotonic`; None where that is not known.
    """

    ticket: int
    outcome: Outcome
    tier: str
    at: float | None = None


def count_write(counts: Counter[str], done: BlockDone) -> None:
    """Count what became of a write."""
    if done.outcome is Outcome.OK:
        counts[f"{done.tier}_saved_blocks"] += 1
    elif done.outcome is not Outcome.DUPLICATE:
        counts[f"{done.tier}_write_{done.outcome.value}"] += 1


class BlockIo(Protocol):
    """Holds blocks below the host tier. All methods belong to one thread and none waits, except
    `close`.

    The caller names each operation with a ticket, a number that no other operation under way has;
    the answer carries the same ticket, whatever stands between the caller and the store.

    A slot given to `read` or `write` belongs to the operation until its answer was polled: nobody
    else writes it, and after the answer nothing here touches it any more. Deadlines are on
    `time.monotonic`; an operation not begun by then is answered TIMED_OUT.
    """

    @property
    def name(self) -> str:
        """For people: shown with every hit as the storage back end."""

    @property
    def capacity(self) -> int:
        """Blocks that fit; 0 when that is not known."""

    def contains(self, block_ids: Sequence[bytes]) -> int:
        """How many of the first identities are here without a gap, as far as known now. In
        microseconds. A yes is no promise."""

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        """Find out about the identities after those that `contains` counts. True while an answer
        is on its way, soon enough for a request to wait for it."""

    def wants(self, block_id: bytes) -> bool:
        """Whether a write of this block would add anything, as far as known now."""

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        """Store a block from its slot. False when it is refused because the queue is full; then
        there is no answer."""

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        """Fetch a block into a slot and verify it."""

    def flush(self) -> None:
        """What was asked for begins now; without this call it may wait for the next `poll`."""

    def poll(self) -> list[BlockDone]:
        """Answers since the last call, in the order in which they came."""

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """A prefix path was used, wherever it was served from; identities in path order. Blocks
        that are not here are ignored."""

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """When waiting requests will use blocks, as far as that has changed: a rank, smaller is
        sooner, or None for no more. A hint for eviction; it may be late or lost."""

    def clear(self) -> None:
        """Remove every block of this model. Nothing that was here is found from now on."""

    def levels(self) -> dict[str, int]:
        """Numbers that go up and down, by the name under which they are shown."""

    def counts(self) -> Counter[str]:
        """Numbers that only grow, for what no answer tells."""

    def close(self) -> None:
        """Finish what was submitted and give everything back."""


_COUNTED = (
    "evicted_blocks",
    "expired_blocks",
    "directory_pauses",
    "index_refused",
    "scrub_damaged",
    "maintenance_errors",
)
"""Counters of the store that no answer tells."""


class DiskThreads:
    """BlockIo on threads of this process: some write in batches, some read.

    on_done: called on a thread of this class after each answer, for whoever sleeps until then.
    """

    name = "disk"

    def __init__(
        self, store: DiskStore, pool: HostPool, on_done: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._pool = pool
        self._on_done = on_done
        directories = store.directories
        self._done: deque[BlockDone] = deque()
        self._writes: deque[_Write] = deque()
        self._work = threading.Semaphore(0)
        self._closing = False
        self._readers = ThreadPoolExecutor(READ_THREADS * directories, "hc-read")
        self._writers = [
            threading.Thread(target=self._write_all, name=f"hc-write_{number}", daemon=True)
            for number in range(WRITE_THREADS * directories)
        ]
        for writer in self._writers:
            writer.start()

    @property
    def capacity(self) -> int:
        return self._store.capacity

    def contains(self, block_ids: Sequence[bytes]) -> int:
        return self._store.contains(block_ids)

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        return False

    def wants(self, block_id: bytes) -> bool:
        return not self._store.contains((block_id,))

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        if len(self._writes) >= WRITE_QUEUE:
            return False
        self._writes.append(_Write(ticket, block, slot, deadline))
        self._work.release()
        return True

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        self._readers.submit(self._read, ticket, block_id, slot, deadline)

    def flush(self) -> None:
        """Threads begin at once."""

    def poll(self) -> list[BlockDone]:
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def touch(self, block_ids: Sequence[bytes]) -> None:
        self._store.touch(block_ids)

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        self._store.expect(uses)

    def clear(self) -> None:
        self._store.clear()

    def levels(self) -> dict[str, int]:
        store = self._store
        return {"disk_blocks": len(store), "disk_directories": store.directories_in_use()}

    def counts(self) -> Counter[str]:
        counters = self._store.counters()
        return Counter({f"disk_{name}": counters[name] for name in _COUNTED})

    def close(self) -> None:
        self._closing = True
        self._work.release(len(self._writers))
        for writer in self._writers:
            writer.join()
        self._readers.shutdown()
        self._store.close()

    # -- threads ---------------------------------------------------------------------------------

    def _answer(self, ticket: int, outcome: Outcome) -> None:
        self._done.append(BlockDone(ticket, outcome, "disk", time.monotonic()))
        self._on_done()

    def _read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        try:
            outcome = self._store.read(block_id, self._pool.slot(slot), deadline=deadline)
        except Exception:
            logger.exception("reading a block from disk failed")
            outcome = Outcome.IO_ERROR
        self._answer(ticket, outcome)

    def _write_all(self) -> None:
        most = max(1, min(BATCH_BLOCKS, BATCH_BYTES // self._store.slot_bytes))
        while True:
            self._work.acquire()
            batch: list[_Write] = []
            with suppress(IndexError):  # another writer may take the last one
                while len(batch) < most:
                    batch.append(self._writes.popleft())
            if not batch and self._closing:
                return
            if batch:
                self._write(batch)

    def _write(self, batch: list[_Write]) -> None:
        now = time.monotonic()
        fresh = [write for write in batch if now < write.deadline]
        items = [(write.block, self._pool.slot(write.slot)) for write in fresh]
        try:
            outcomes = self._store.write_many(items)
        except Exception:
            logger.exception("writing %d blocks to disk failed", len(fresh))
            outcomes = [Outcome.IO_ERROR] * len(fresh)
        for write in batch:
            if write.deadline <= now:
                self._answer(write.ticket, Outcome.TIMED_OUT)
        for write, outcome in zip(fresh, outcomes, strict=True):
            self._answer(write.ticket, outcome)


class _Write(NamedTuple):
    ticket: int
    block: Block
    slot: int
    deadline: float
