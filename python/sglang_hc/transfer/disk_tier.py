"""The disk tier beside the host tier: full blocks spill once, and come back ahead of admission.

    spill      a block whose bytes are in place is written by one thread; it stays pinned meanwhile
    prefetch   blocks a queued request needs are read by several threads into staged host slots, and
               published in path order; the request is passed over until they are there
    failure    a block that cannot be written is not on disk; one that cannot be read or verified is
               a miss: the request recomputes. Both are counted.

Blocks are found on disk by identity alone, so a restarted server needs no scan. All methods belong
to the scheduler thread and never wait; the threads touch the store and the slots' bytes only.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.disk import Block, DiskStore, ReadStatus, WriteStatus
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tree.block_tree import BLOCK_BYTES, BlockNode
from sglang_hc.tree.host_tier import HostTier, Spare
from sglang_hc.tree.identity import TOKEN_BYTES, block_id

logger = logging.getLogger(__name__)

SPILL_QUEUE = 256
"""Blocks that may wait to be written; beyond it a save is dropped and counted."""

READ_THREADS = 4
"""Reads under way per directory."""

READ_DEADLINE_S = 10.0
"""Longest a read may take before it counts as failed."""

PATIENCE = 5.0
"""Seconds a request is passed over for its prefetch before it recomputes instead."""


class Prefetched(enum.Enum):
    """What became of the wish to prefetch."""

    NOTHING = enum.auto()  # the disk has nothing to add
    STARTED = enum.auto()
    NO_ROOM = enum.auto()  # no slot, or another request is fetching the same block


@dataclass(eq=False)
class _Read:
    """One block on its way into a staged slot. status is None until the thread is through."""

    identity: bytes
    tokens: bytes
    slot: int
    status: ReadStatus | None = None


@dataclass(eq=False)
class _Prefetch:
    """What a queued request waits for. `namespace` and `prefix` lead to the first read's parent."""

    namespace: str | None
    prefix: bytes
    reads: list[_Read]
    deadline: float
    published: int = 0
    failed: bool = False

    @property
    def over(self) -> bool:
        return self.failed or self.published == len(self.reads)


class DiskTier:
    """Spills and prefetches blocks of one host tier."""

    def __init__(
        self,
        store: DiskStore,
        host: HostTier,
        pool: HostPool,
        num_directories: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._host = host
        self._pool = pool
        self._clock = clock
        self._usable = True
        self._prefetches: dict[str, _Prefetch] = {}
        self._orphans: list[_Prefetch] = []
        self._loaded: dict[str, int] = {}
        self._reading: set[bytes] = set()
        self._readers = ThreadPoolExecutor(READ_THREADS * num_directories, "hc-read")
        self._spills: deque[tuple[BlockNode, Block]] = deque()
        self._spill_ready = threading.Semaphore(0)
        self._spilled: deque[tuple[BlockNode, WriteStatus]] = deque()
        self._spilling = 0
        self._closing = False
        self._writer = threading.Thread(target=self._write, name="hc-write", daemon=True)
        self._writer.start()
        self.counters: Counter[str] = Counter()

    # -- spill -----------------------------------------------------------------------------------

    def spill(self, node: BlockNode) -> None:
        """A block's bytes are in place: write it, unless it is a tail or on disk already."""
        if not self._usable or not node.is_full or self._store.contains([node.block_id]):
            return
        if self._spilling >= SPILL_QUEUE:
            self.counters["disk_save_dropped"] += 1
            return
        path = node.path()
        parent = node.parent
        assert parent is not None
        label = "" if node.namespace is None else node.namespace
        block = Block(node.block_id, parent.block_id, label, len(path) - 1, node.tokens)
        self._host.pin([node])
        self._spilling += 1
        self._spills.append((node, block))
        self._spill_ready.release()

    # -- prefetch --------------------------------------------------------------------------------

    def prefetch(
        self,
        rid: str,
        namespace: str | None,
        tokens: bytes,
        on_device: int,
        spare: Spare | None = None,
    ) -> Prefetched:
        """Start reading what a queued request needs beyond what the host tier can serve.

        Only whole blocks, as far as they are on disk without a gap, and only if that goes beyond
        the `on_device` tokens the device has. Room is made by evicting what `spare` does not
        protect. Nothing is allocated for a miss.
        """
        if rid in self._prefetches:
            return Prefetched.STARTED
        match = self._host.tree.match(namespace, tokens)
        if not self._usable or any(not node.ready for node in match.nodes):
            return Prefetched.NOTHING  # a block still being filed was computed just now
        first = match.tokens // BLOCK_TOKENS
        wanted = self._identities(namespace, tokens, first)
        found = self._store.contains([identity for identity, _ in wanted])
        if found == 0 or (first + found) * BLOCK_TOKENS <= on_device:
            return Prefetched.NOTHING
        if any(identity in self._reading for identity, _ in wanted[:found]):
            return Prefetched.NO_ROOM  # once it has arrived for the other request, it is in memory
        slots = self._stage(found, match.nodes, spare)
        if slots is None:
            return Prefetched.NO_ROOM
        blocks = zip(wanted[:found], slots, strict=True)
        reads = [_Read(identity, piece, slot) for (identity, piece), slot in blocks]
        self._reading.update(read.identity for read in reads)
        for read in reads:
            self._readers.submit(self._fetch, read)
        prefix = tokens[: first * BLOCK_BYTES]
        self._prefetches[rid] = _Prefetch(namespace, prefix, reads, self._clock() + PATIENCE)
        self.counters["prefetches"] += 1
        return Prefetched.STARTED

    def beyond(
        self, namespace: str | None, tokens: bytes, nodes: Sequence[BlockNode]
    ) -> list[bytes]:
        """Identities of whole blocks on disk that continue the host tier's path `nodes`."""
        first = sum(node.is_full for node in nodes)
        if (
            first
            and tokens[(first - 1) * BLOCK_BYTES : first * BLOCK_BYTES] != nodes[first - 1].tokens
        ):
            first -= 1  # only the first rows of that block are shared
        identities = [identity for identity, _ in self._identities(namespace, tokens, first)]
        return identities[: self._store.contains(identities)]

    def ready(self, rid: str) -> bool:
        """False: pass the request over; something is on its way that does not take too long."""
        prefetch = self._prefetches.get(rid)
        if prefetch is None:
            return True
        if not prefetch.over and self._clock() < prefetch.deadline:
            return False
        if not prefetch.over:
            self.counters["prefetch_late"] += 1
        loaded = self.take_loaded(rid) + prefetch.published * BLOCK_TOKENS
        self.cancel(rid)
        self._loaded[rid] = loaded
        return True

    def take_loaded(self, rid: str) -> int:
        """Tokens that came from disk for this request; asked once."""
        return self._loaded.pop(rid, 0)

    def cancel(self, rid: str) -> None:
        """The request no longer waits. Blocks on their way still arrive."""
        prefetch = self._prefetches.pop(rid, None)
        self._loaded.pop(rid, None)
        if prefetch is not None and not prefetch.over:
            self._orphans.append(prefetch)

    # -- upkeep ----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Apply what the threads have finished, whoever waits for it."""
        while self._spilled:
            node, status = self._spilled.popleft()
            self._spilling -= 1
            self._host.unpin([node])
            self.counters["disk_saved_blocks"] += status is WriteStatus.OK
            if status in (WriteStatus.NO_SPACE, WriteStatus.IO_ERROR):
                self.counters[f"disk_write_{status.name.lower()}"] += 1
        for prefetch in [*self._prefetches.values(), *self._orphans]:
            self._publish(prefetch)
        self._orphans = [prefetch for prefetch in self._orphans if not prefetch.over]

    @property
    def reading(self) -> bool:
        """Blocks are on their way from disk."""
        return bool(self._reading)

    @property
    def busy(self) -> int:
        """Operations under way."""
        return self._spilling + len(self._prefetches) + len(self._orphans)

    def drain(self) -> None:
        """Wait for everything under way; for tests and orderly stops."""
        while self.busy:
            self.poll()
            for rid in [rid for rid, prefetch in self._prefetches.items() if prefetch.over]:
                self.ready(rid)
            time.sleep(0.001)

    def quiesce(self) -> None:
        """No thread writes to a slot any more, no block is pinned. Before the tier is cleared."""
        for rid in list(self._prefetches):
            self.cancel(rid)
        self.drain()

    def disown(self) -> None:
        """The weights changed: what is on disk belongs to others, what comes has no identity."""
        self.quiesce()
        if self._usable:
            logger.warning("sglang-hc: the weights changed; the disk tier is off until a restart")
        self._usable = False

    def forget(self) -> bool:
        """Delete every block on disk. False when the disk tier is off."""
        self.quiesce()
        if self._usable:
            self._store.delete(self._store.block_ids())
        return self._usable

    def close(self) -> None:
        """Finish writes under way and close the store."""
        self.quiesce()
        self._closing = True
        self._spill_ready.release()
        self._writer.join()
        self._readers.shutdown()
        self._store.close()

    def _identities(
        self, namespace: str | None, tokens: bytes, first: int
    ) -> list[tuple[bytes, bytes]]:
        """(identity, tokens) of every whole block from `first` on."""
        tree = self._host.tree
        match = tree.match(namespace, tokens[: first * BLOCK_BYTES])
        parent = match.nodes[first - 1].block_id if first else tree.root(namespace).block_id
        wanted = []
        for start in range(first * BLOCK_BYTES, len(tokens) - BLOCK_BYTES + 1, BLOCK_BYTES):
            piece = tokens[start : start + BLOCK_BYTES]
            parent = block_id(tree.fingerprint, parent, piece)
            wanted.append((parent, piece))
        return wanted

    def _stage(
        self, count: int, path: Sequence[BlockNode], spare: Spare | None
    ) -> list[int] | None:
        """Slots for all of a run, or none: half a prefetch would evict for little."""
        slots: list[int] = []
        self._host.pin(path)  # making room must not take the path the run extends
        while len(slots) < count:
            slot = self._host.stage(self._clock(), spare)
            if slot is None:
                break
            slots.append(slot)
        self._host.unpin(path)
        if len(slots) == count:
            return slots
        for slot in slots:
            self._host.unstage(slot)
        return None

    def _publish(self, prefetch: _Prefetch) -> None:
        """Make blocks of the reads that are through, in path order; end the run at a failure."""
        while not prefetch.over:
            read = prefetch.reads[prefetch.published]
            if read.status is None:
                return
            match = self._host.tree.match(prefetch.namespace, prefetch.prefix)
            whole = match.tokens * TOKEN_BYTES == len(prefetch.prefix)
            if read.status is not ReadStatus.OK or not whole:
                self._give_up(prefetch, read.status)
                return
            parent = match.nodes[-1] if match.nodes else self._host.tree.root(prefetch.namespace)
            outcome = self._host.publish(parent, read.tokens, read.slot, self._clock())
            self._reading.discard(read.identity)
            if outcome.created:
                self._host.mark_ready(outcome.node)
                self._host.access(outcome.node.path(), self._clock())
            else:
                self._host.unstage(read.slot)
            prefetch.prefix += read.tokens
            prefetch.published += 1
            self.counters["disk_loaded_blocks"] += 1

    def _give_up(self, prefetch: _Prefetch, status: ReadStatus) -> None:
        """Free the slots of the reads that are left; only once all of them are through."""
        left = prefetch.reads[prefetch.published :]
        if any(read.status is None for read in left):
            return
        for read in left:
            self._host.unstage(read.slot)
            self._reading.discard(read.identity)
        prefetch.failed = True
        name = "parent_gone" if status is ReadStatus.OK else status.name.lower()
        self.counters[f"disk_read_{name}"] += 1

    # -- threads ---------------------------------------------------------------------------------

    def _fetch(self, read: _Read) -> None:
        try:
            deadline = time.monotonic() + READ_DEADLINE_S
            read.status = self._store.read(
                read.identity, self._pool.slot(read.slot), deadline=deadline
            )
        except Exception:
            logger.exception("reading a block from disk failed")
            read.status = ReadStatus.IO_ERROR

    def _write(self) -> None:
        while True:
            self._spill_ready.acquire()
            batch: list[tuple[BlockNode, Block]] = []
            while self._spills and len(batch) < 32:
                batch.append(self._spills.popleft())
            if not batch and self._closing:
                return
            try:
                items = [(block, self._pool.slot(node.slot)) for node, block in batch]
                statuses = self._store.write_many(items) if items else []
            except Exception:
                logger.exception("writing %d blocks to disk failed", len(batch))
                statuses = [WriteStatus.IO_ERROR] * len(batch)
            self._spilled.extend(zip((node for node, _ in batch), statuses, strict=True))
