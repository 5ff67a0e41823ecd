"""The disk tier beside the host tier: full blocks spill once, and come back ahead of admission.

    spill      a block whose bytes are in place is written; it stays pinned meanwhile
    prefetch   blocks a queued request needs are read into staged host slots and published in path
               order; the request is passed over until they are there
    failure    a block that cannot be written is not on disk; one that cannot be read or verified is
               a miss: the request recomputes. Both are counted.

Blocks are found on disk by identity alone, so a restarted server needs no scan. Which blocks exist
and who owns which slot is decided here; moving the bytes is `store.block_io`'s business. All
methods belong to the scheduler thread and never wait.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.block_io import BlockDone, BlockIo, Outcome, count_write
from sglang_hc.store.disk import Block
from sglang_hc.tree.block_tree import BLOCK_BYTES, BlockNode
from sglang_hc.tree.host_tier import HostTier, Spare
from sglang_hc.tree.identity import TOKEN_BYTES, block_id

logger = logging.getLogger(__name__)

READ_DEADLINE_S = 10.0
"""Longest a read may take before it counts as failed."""

WRITE_DEADLINE_S = 30.0
"""Longest a block may wait to be written: it holds its slot meanwhile."""

PATIENCE = 5.0
"""Most seconds a request is passed over for its prefetch before it recomputes instead."""


Worth = Callable[[int, int, int, int, bool], bool]
Patience = Callable[[int, int, int, int], float]


class Prefetched(enum.Enum):
    """What became of the wish to prefetch."""

    NOTHING = enum.auto()  # nothing below has anything to add
    ASKING = enum.auto()  # not known yet, but soon
    STARTED = enum.auto()
    NO_ROOM = enum.auto()  # no slot, or another request is fetching the same block


@dataclass(eq=False)
class _Read:
    """One block on its way into a staged slot. done is None until the read is through."""

    identity: bytes
    tokens: bytes
    slot: int
    done: BlockDone | None = None


@dataclass(eq=False)
class _Prefetch:
    """What a queued request waits for. `namespace` and `prefix` lead to the first read's parent.

    patience: seconds to wait at most, from the request's turn on; then `deadline` is set.
    """

    namespace: str | None
    prefix: bytes
    reads: list[_Read]
    patience: float
    deadline: float | None = None
    published: int = 0
    failed: bool = False

    @property
    def over(self) -> bool:
        return self.failed or self.published == len(self.reads)


class DiskTier:
    """Spills and prefetches blocks of one host tier."""

    def __init__(
        self, io: BlockIo, host: HostTier, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._io = io
        self._host = host
        self._clock = clock
        self._usable = True
        self._prefetches: dict[str, _Prefetch] = {}
        self._orphans: list[_Prefetch] = []
        self._loaded: dict[str, int] = {}
        self._late: set[str] = set()
        self._reading: set[bytes] = set()
        self._reads: dict[int, _Read] = {}
        self._spills: dict[int, BlockNode] = {}
        self.counters: Counter[str] = Counter()
        self.worth: Worth = lambda host, disk, context, new, ahead: True
        """Asked before reading; see `restore_choice.RestoreChoice.worth_reading`."""
        self.on_staged: Callable[[int], None] = lambda slot: None
        """Told of every slot that is given to a read: what it was before is over."""
        self.patience: Patience = lambda host, disk, context, new: PATIENCE
        """Seconds that a request waits at most; see `RestoreChoice.patience`."""

    @property
    def name(self) -> str:
        """What holds the blocks, for people."""
        return self._io.name

    @property
    def capacity(self) -> int:
        """Blocks that fit; 0 when that is not known."""
        return self._io.capacity

    # -- spill -----------------------------------------------------------------------------------

    def spill(self, node: BlockNode) -> None:
        """A block's bytes are in place: write it, unless it is a tail or on disk already."""
        if not self._usable or not node.is_full or not self._io.wants(node.block_id):
            return
        path = node.path()
        parent = node.parent
        assert parent is not None
        label = "" if node.namespace is None else node.namespace
        block = Block(node.block_id, parent.block_id, label, len(path) - 1, node.tokens)
        ticket = self._io.write(block, node.slot, self._clock() + WRITE_DEADLINE_S)
        if ticket is None:
            self.counters["disk_save_dropped"] += 1
            return
        self._host.pin([node])
        self._spills[ticket] = node

    # -- prefetch --------------------------------------------------------------------------------

    def prefetch(
        self,
        rid: str,
        namespace: str | None,
        tokens: bytes,
        on_device: int,
        spare: Spare | None = None,
        ahead: bool = False,
    ) -> Prefetched:
        """Start reading what a queued request needs beyond what the host tier can serve.

        Only whole blocks, as far as they are on disk without a gap, and only if that goes beyond
        the `on_device` tokens the device has, and only if it is `worth` it. Room is made by
        evicting what `spare` does not protect. Nothing is allocated for a miss. ahead: others are
        served before this request.
        """
        if rid in self._prefetches:
            return Prefetched.STARTED
        if rid in self._late:
            return Prefetched.NOTHING  # it has waited enough
        if not self._usable or len(tokens) // BLOCK_BYTES * BLOCK_TOKENS <= on_device:
            return Prefetched.NOTHING
        match = self._host.tree.match(namespace, tokens)
        if any(not node.ready for node in match.nodes):
            return Prefetched.NOTHING  # a block still being filed was computed just now
        first = match.tokens // BLOCK_TOKENS
        wanted = self._identities(namespace, tokens, first)
        identities = [identity for identity, _ in wanted]
        if self._io.ask(identities):
            return Prefetched.ASKING
        found = self._io.contains(identities)
        if found == 0 or (first + found) * BLOCK_TOKENS <= on_device:
            return Prefetched.NOTHING
        if any(identity in self._reading for identity, _ in wanted[:found]):
            return Prefetched.NO_ROOM  # once it has arrived for the other request, it is in memory
        known = max(match.tokens, on_device)
        held = max(known, (first + found) * BLOCK_TOKENS)
        new = max(1, len(tokens) // TOKEN_BYTES - held)
        if not self.worth(known - on_device, held - known, on_device, new, ahead):
            self.counters["prefetch_not_worth"] += 1
            return Prefetched.NOTHING
        slots = self._stage(found, match.nodes, spare)
        if slots is None:
            return Prefetched.NO_ROOM
        blocks = zip(wanted[:found], slots, strict=True)
        reads = [_Read(identity, piece, slot) for (identity, piece), slot in blocks]
        self._reading.update(read.identity for read in reads)
        through = self._clock() + READ_DEADLINE_S
        for read in reads:
            self._reads[self._io.read(read.identity, read.slot, through)] = read
        self._io.flush()  # the next poll may be a whole forward pass away
        prefix = tokens[: first * BLOCK_BYTES]
        patience = min(PATIENCE, self.patience(known - on_device, held - known, on_device, new))
        deadline = None if ahead else self._clock() + patience
        self._prefetches[rid] = _Prefetch(namespace, prefix, reads, patience, deadline)
        self.counters["prefetches"] += 1
        return Prefetched.STARTED

    def holds(self, block_id: bytes) -> bool:
        """Whether this block is below the host tier, as far as known. Asks nobody."""
        return not self._io.wants(block_id)

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """A prefix path was used, wherever it was served from; identities in path order."""
        self._io.touch(block_ids)

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """Pass on when waiting requests will use blocks; see `BlockIo.expect`."""
        self._io.expect(uses)

    def ready(self, rid: str) -> bool:
        """False: pass the request over; something is on its way that does not take too long."""
        prefetch = self._prefetches.get(rid)
        if prefetch is None:
            return True
        if prefetch.deadline is None:
            prefetch.deadline = self._clock() + prefetch.patience
        if not prefetch.over and self._clock() < prefetch.deadline:
            return False
        loaded = self.take_loaded(rid) + prefetch.published * BLOCK_TOKENS
        self.cancel(rid)
        if not prefetch.over:
            self.counters["prefetch_late"] += 1
            self._late.add(rid)
        self._loaded[rid] = loaded
        return True

    def fetching(self, rid: str) -> bool:
        """More of what the request needs is on its way to the host tier."""
        prefetch = self._prefetches.get(rid)
        return prefetch is not None and not prefetch.over

    def take_loaded(self, rid: str) -> int:
        """Tokens that came from disk for this request; asked once."""
        return self._loaded.pop(rid, 0)

    def cancel(self, rid: str) -> None:
        """The request no longer waits. Blocks on their way still arrive."""
        prefetch = self._prefetches.pop(rid, None)
        self._loaded.pop(rid, None)
        self._late.discard(rid)
        if prefetch is not None and not prefetch.over:
            self._orphans.append(prefetch)

    # -- upkeep ----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Apply what is done, whoever waits for it."""
        for done in self._io.poll():
            read = self._reads.pop(done.ticket, None)
            if read is not None:
                read.done = done
            else:
                self._end_spill(self._spills.pop(done.ticket), done)
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
        return len(self._spills) + len(self._prefetches) + len(self._orphans)

    def drain(self) -> None:
        """Wait for everything under way; for tests and orderly stops."""
        while self.busy:
            self.poll()
            for rid in [rid for rid, prefetch in self._prefetches.items() if prefetch.over]:
                self.ready(rid)
            time.sleep(0.001)

    def quiesce(self) -> None:
        """Nothing is on its way to a slot, no block is pinned. Before the tier is cleared."""
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
            self._io.clear()
        return self._usable

    def levels(self) -> dict[str, int]:
        """Numbers that go up and down."""
        return self._io.levels()

    def counts(self) -> Counter[str]:
        """Numbers that only grow, those of what is below included."""
        return self.counters + self._io.counts()

    def close(self) -> None:
        """Finish writes under way and close the store."""
        self.quiesce()
        self._io.close()

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
            for slot in slots:
                self.on_staged(slot)
            return slots
        for slot in slots:
            self._host.unstage(slot)
        return None

    def _publish(self, prefetch: _Prefetch) -> None:
        """Make blocks of the reads that are through, in path order; end the run at a failure."""
        first = prefetch.published
        if prefetch.over or prefetch.reads[first].done is None:
            return
        node = self._end_of(prefetch)
        created = False
        while not prefetch.over:
            read = prefetch.reads[prefetch.published]
            if read.done is None:
                break
            if read.done.outcome is not Outcome.OK or node is None:
                self._give_up(prefetch, read.done)
                break
            outcome = self._host.publish(node, read.tokens, read.slot, self._clock())
            self._reading.discard(read.identity)
            if outcome.created:
                self._host.mark_ready(outcome.node)
                created = True
            else:
                self._host.unstage(read.slot)
            node = outcome.node
            prefetch.published += 1
            self.counters[f"{read.done.tier}_loaded_blocks"] += 1
        prefetch.prefix += b"".join(r.tokens for r in prefetch.reads[first : prefetch.published])
        if created and node is not None:
            self._host.access(node.path(), self._clock())

    def _end_of(self, prefetch: _Prefetch) -> BlockNode | None:
        """The block, or root, that the next read goes below; None when it has left."""
        match = self._host.tree.match(prefetch.namespace, prefetch.prefix)
        if match.tokens * TOKEN_BYTES != len(prefetch.prefix):
            return None
        return match.nodes[-1] if match.nodes else self._host.tree.root(prefetch.namespace)

    def _give_up(self, prefetch: _Prefetch, done: BlockDone) -> None:
        """Free the slots of the reads that are left; only once all of them are through."""
        left = prefetch.reads[prefetch.published :]
        if any(read.done is None for read in left):
            return
        for read in left:
            self._host.unstage(read.slot)
            self._reading.discard(read.identity)
        prefetch.failed = True
        reason = "parent_gone" if done.outcome is Outcome.OK else done.outcome.value
        self.counters[f"{done.tier}_read_{reason}"] += 1

    def _end_spill(self, node: BlockNode, done: BlockDone) -> None:
        self._host.unpin([node])
        count_write(self.counters, done)
