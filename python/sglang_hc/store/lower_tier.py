"""Below the host tier: full blocks are written there once, and come back ahead of admission.

    write_through  a block whose bytes are in place is written, unless its path must be used first
               (`--hc-write`); it stays pinned meanwhile
    fetch      blocks a queued request needs are read into staged host slots and published in path
               order (tree/promotions.py); which and when, the look at the queue decides
    failure    a block that cannot be written is not on disk; one that cannot be read or verified is
               a miss: the request recomputes. Both are counted.

Blocks are found on disk by identity alone, so a restarted server needs no scan. Which blocks exist
and who owns which slot is decided here; moving the bytes is `store.block_io`'s business. All
methods belong to the scheduler thread and never wait.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.eviction import IsProtected
from sglang_hc.policy.writing import WriteAdmission
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import WRITE_QUEUE, BlockDone, BlockIo, Change, count_write
from sglang_hc.store.disk.format import clip_label
from sglang_hc.store.ends_below import EndsBelow
from sglang_hc.store.erasures import Ended, Erasures
from sglang_hc.store.executor import DRAIN_S
from sglang_hc.store.outcome import GOOD, Outcome
from sglang_hc.store.read_watch import OnRead, ReadWatch, not_observed
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import BlockPath
from sglang_hc.tree.namespaces import Namespace
from sglang_hc.tree.promotions import Promotion, Promotions

logger = logging.getLogger(__name__)

READ_DEADLINE_S = 10.0
"""A read may come so much later than a slow source would bring it; then it counts as failed."""

LENIENCE = 2
"""A source is slow when it takes so many times as long as expected."""

WRITE_DEADLINE_S = 30.0
"""Longest a block may wait to be written: it holds its slot meanwhile."""

MOST_UNSAVED = 1 << 16
"""Blocks in host memory of which is remembered that they could not be written."""

Protected = IsProtected[BlockNode] | None
"""Which blocks must not make room for a fetch; None where all may."""

BlockSeconds = Callable[[SourceTier], float]
"""Seconds that a tier is expected to take for one block of many; 0 when that is not known."""


class LowerTier:
    """Writes blocks of one host tier through, and fetches them again. coming: the blocks on
    their way. ends: what goes below with them where paths need ends; set by whoever builds it. What
    it has of `BlockIo` by the same name is that."""

    def __init__(
        self,
        io: BlockIo,
        host: HostTier,
        clock: Callable[[], float] = time.monotonic,
        on_read: OnRead = not_observed,
        pause: Callable[[], None] = lambda: time.sleep(0.001),
        block_seconds: BlockSeconds = lambda tier: 0.0,
        admission: WriteAdmission | None = None,
        is_kept: Callable[[str | None], bool] = lambda namespace: True,
    ) -> None:
        """pause: between two polls of somebody who cannot go on before the answers are there.
        admission: which blocks may be written; None for all. is_kept: whether what is in a
        namespace is written."""
        self._io = io
        self._host = host
        self.now, self.began = clock, clock()
        self.coming = Promotions(host)
        self.ends: EndsBelow | None = None
        self.named: Callable[[bytes], Block | None] = lambda block_id: None
        """What a store says of one of its blocks, for any thread but the scheduler's: it reads.
        Set by whoever has stores that say it."""
        self._tickets = itertools.count(1)
        self._reads: dict[int, tuple[Promotion, SourceTier]] = {}
        self._writes: dict[int, BlockNode] = {}
        self._writing: set[bytes] = set()
        self._given_up: dict[int, int] = {}
        """Slots by the tickets of operations that were given up and not answered since."""
        self._erasures = Erasures(io)
        self._distrusted: set[bytes] = set()
        """Blocks from which on nothing is read or written until a restart."""
        self._unsaved: dict[bytes, None] = {}
        """Blocks whose writes failed, the oldest first."""
        self._can_write = True
        """The last write to end, or to be asked for, did not fail."""
        self._asks = False
        self.counters, self.capacity, self.name = io.counts, io.capacity, io.name
        self.touch, self.expect = io.touch, io.expect
        self.sources = io.sources
        self.fetched: deque[tuple[SourceTier, float]] = deque(maxlen=256)
        """Of the newest blocks that came: their tier, and seconds since they were asked for."""
        below = (SourceTier.DISK, SourceTier.REMOTE)
        self._watches = {tier: ReadWatch(tier, on_read) for tier in below}
        self._pause = pause
        self._block_seconds = block_seconds
        self._admission = admission
        self._is_kept = is_kept

    # -- write through ---------------------------------------------------------------------------

    def write_through(self, node: BlockNode) -> None:
        """A block's bytes are in place: write it, unless it is a tail or on disk already, or the
        path must be used first."""
        if self._admission is None:
            self._write(node)

    def _write(self, node: BlockNode) -> None:
        if not node.is_full or not self._io.wants(node.block_id):
            return
        path = node.path()
        trusted = self._distrusted.isdisjoint(one.block_id for one in path)
        if trusted and self._is_kept(node.namespace):
            self._begin_write(node, len(path) - 1)

    def _begin_write(self, node: BlockNode, position: int) -> None:
        parent = node.parent
        assert parent is not None
        label = clip_label(node.namespace or "")  # as much of it as a header has room for
        block = Block(node.block_id, parent.block_id, label, position, node.tokens)
        ticket = next(self._tickets)
        self._io.write(ticket, block, node.slot, self.now() + WRITE_DEADLINE_S)
        for watch in self._watches.values():
            watch.disturbed()
        self._host.pin([node])
        self._writes[ticket] = node
        self._writing.add(node.block_id)

    def path_used(self, path: Sequence[BlockNode]) -> None:
        """A path was used: write those of its blocks whose writes failed, if writes end well again,
        and those that are worth it now."""
        if self._admission is not None:
            if path and self._is_kept(path[0].namespace):
                self._write_admitted([node for node in path if node.is_full], self._admission)
        elif self._unsaved and self._can_write:
            for node in path:
                if node.block_id in self._unsaved and node.ready and node.moved is None:
                    del self._unsaved[node.block_id]
                    self._write(node)

    def _write_admitted(self, path: Sequence[BlockNode], admission: WriteAdmission) -> None:
        """Up to the first block that may not be written: what is behind it could not be found."""
        now, room = self.now(), WRITE_QUEUE if self._can_write else 1
        count = admission.used([node.block_id for node in path], now)
        for position, node in enumerate(path[:count]):
            if not node.ready or node.moved is not None or node.block_id in self._distrusted:
                return
            if not self._has(node):
                if len(self._writes) >= room or not admission.take(now):
                    return
                self._begin_write(node, position)
            if self.ends is not None and node.end is not None and node.end.ready:
                self.ends.write_through(node.end)

    def keeps_end_of(self, node: BlockNode) -> bool:
        """Whether the end part of a block is written now: where the block is, within the budget."""
        if self._admission is None or not self._is_kept(node.namespace):
            return self._is_kept(node.namespace)
        return self._has(node) and self._admission.take(self.now(), part=True)

    def _has(self, node: BlockNode) -> bool:
        """Whether a block is below, as far as known, or on its way there. Asks nobody."""
        name = node.block_id
        return name in self._writing or not self._io.wants(name, had=node.below)

    # -- fetch -----------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether answers are on their way: to reads, to writes, or to the last `find`."""
        return bool(self.busy or self._asks or (self.ends is not None and self.ends.is_busy))

    def levels(self) -> dict[str, int]:
        """Numbers that go up and down."""
        return self._io.levels() | (self.ends.levels() if self.ends is not None else {})

    def find(self, block_ids: Sequence[bytes]) -> int | None:
        """How many of the first identities are below the host tier, without a gap; None when that
        is not known yet, but soon."""
        if not block_ids:
            return 0
        self._asks = self._io.ask(block_ids)
        return None if self._asks else self._io.contains(block_ids)

    def news(self, *, anew: bool = False) -> list[Change]:
        """As in `BlockIo`."""
        return self._io.news(anew=anew)

    def fetch(self, path: BlockPath, first: int, count: int, is_protected: Protected = None) -> int:
        """Start reading blocks [first, first + count) of a path: as many leading ones as find a
        slot without evicting what `is_protected` protects. Returns how many.

        None of these may be on its way.
        """
        now = self.now()
        promotions = self.coming.begin(path, first, count, now, is_protected)
        self.read(promotions, path.block_ids[first : first + len(promotions)])
        return len(promotions)

    def fetch_tail(
        self, path: BlockPath, low: int, high: int, is_protected: Protected = None
    ) -> list[Promotion]:
        """Start reading blocks [low, high), the last one first, before what they continue is in
        the tree; see `Promotions.begin_tail`. The caller has `coming` join or give them up."""
        now = self.now()
        promotions = self.coming.begin_tail(path, low, high, now, is_protected)
        self.read(promotions, [promotion.block_id for promotion in promotions])
        return promotions

    def read(self, promotions: Sequence[Promotion], block_ids: Sequence[bytes]) -> None:
        """Start reading blocks into the slots of promotions that began. block_ids: of each the
        identity whose bytes it gets. Each has READ_DEADLINE_S, and LENIENCE times what its tier is
        expected to take for it and for each block of that tier before it, those under way
        included."""
        now, idle = self.now(), not self._writes
        sources = self.sources(block_ids)
        each = {tier: LENIENCE * self._block_seconds(tier) for tier in set(sources)}
        due = {tier: now + READ_DEADLINE_S + self.reading(tier) * each[tier] for tier in each}
        for promotion, block_id, tier in zip(promotions, block_ids, sources, strict=True):
            ticket = next(self._tickets)
            due[tier] += each[tier]
            self._io.read(ticket, block_id, promotion.slot, due[tier])
            self._reads[ticket] = promotion, tier
        for tier in each:
            self._watches[tier].asked(sources.count(tier), now, idle=idle)

    def came_last(self, tier: SourceTier) -> float:
        """When a tier last answered for a block; 0 for never."""
        return self._watches[tier].ended

    def reading(self, tier: SourceTier) -> int:
        """Blocks that are being read from a tier."""
        return self._watches[tier].under_way if tier in self._watches else 0

    def holds(self, block_id: bytes) -> bool:
        """Whether this block is below the host tier, as far as known. Asks nobody."""
        return block_id not in self._distrusted and not self._io.wants(block_id)

    def trusted(self, path: BlockPath) -> BlockPath:
        """The part of a path that may be looked for: up to the first block that was dropped."""
        for index, block_id in enumerate(path.block_ids if self._distrusted else ()):
            if block_id in self._distrusted:
                return BlockPath(path.prefix.up_to(index), path.block_ids[:index])
        return path

    def drop_branch(self, node: BlockNode) -> None:
        """A block of the tree is not what its tokens give. Its path leaves the disk for good, with
        all that continues it. Until a restart nothing from it on is looked for or written: a remote
        store other than `file` may keep some of these blocks."""
        self.drain()
        self._distrusted.add(node.block_id)
        client = Namespace.of(node.namespace).client.pack()
        what = Forgetting(client, b"".join(one.tokens for one in node.path()))
        self.erase(what, [one.block_id for one in node.branch()], lambda done: None)

    # -- upkeep ----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Apply what is done."""
        self._take_in(self._io.poll())
        if self.ends is not None:
            self.ends.poll()

    def _take_in(self, ended: Iterable[BlockDone]) -> None:
        came, now = [], self.now()
        for done in ended:
            if done.ticket in self._given_up:
                self._host.give_back([self._given_up.pop(done.ticket)])
                continue
            if self._erasures.take(done):
                continue
            if done.outcome is Outcome.STUCK:
                self._host.withhold([self._slot_of(done.ticket)])
            if done.ticket in self._writes:
                self._end_write(self._writes.pop(done.ticket), done)
                continue
            promotion, tier = self._reads.pop(done.ticket)
            self._watches[tier].came(done.outcome, done.at, now)
            if done.outcome is Outcome.OK:
                self.counters[f"{done.tier}_loaded_blocks"] += 1
                promotion.source = tier
                self.fetched.append((tier, now - promotion.asked))
                came.append(promotion)
            else:
                self.counters[f"{done.tier}_read_{done.outcome.value}"] += 1
                self.coming.fail(promotion)
        if came:
            self.coming.complete(came, now)
        if len(self._erasures):
            self._erasures.go_on(self._writes.keys(), now)

    @property
    def busy(self) -> int:
        """Operations under way."""
        return self._moving + len(self._erasures)

    @property
    def _moving(self) -> int:
        """Of these, what is on its way to a slot or from one."""
        return len(self._writes) + len(self._reads)

    def drain(self) -> None:
        """Wait until nothing is on its way to a slot or from one, for at most DRAIN_S: slots that
        something is on its way to then get no new owner before its answer. For tests, orderly
        stops, and before the tier is cleared."""
        self._drain()
        if self.ends is not None:
            self.ends.drain()

    def _drain(self) -> None:
        end = time.monotonic() + DRAIN_S  # several ranks end what is under way in the first pause
        while self._moving:
            self.poll()
            if self._moving and time.monotonic() >= end:
                self._give_up()
                return
            self._pause()

    def _give_up(self) -> None:
        tiers = dict.fromkeys(self._writes, SourceTier.DISK)
        tiers |= {ticket: tier for ticket, (_, tier) in self._reads.items()}
        slots = {ticket: self._slot_of(ticket) for ticket in tiers}
        logger.error("sglang-hc: given up: %d blocks not read or written in time", len(slots))
        self._take_in([BlockDone(one, Outcome.STUCK, tier.value) for one, tier in tiers.items()])
        self._given_up |= slots

    def _slot_of(self, ticket: int) -> int:
        return self._writes[ticket].slot if ticket in self._writes else self._reads[ticket][0].slot

    def erase(self, what: Forgetting | None, block_ids: Sequence[bytes], ended: Ended) -> None:
        """Erase the blocks of some namespaces, or every block for None, below the host tier, behind
        their writes under way. block_ids: see `BlockIo.erase`. ended: called in a later `poll`,
        when every tier has answered."""
        if self.ends is None:
            self._erase(what, block_ids, ended)
            return

        def parts_are_done(parts: Sequence[BlockDone]) -> None:
            self._erase(what, block_ids, lambda blocks: ended([*parts, *blocks]))

        self.ends.erase(what, block_ids, parts_are_done)

    def _erase(self, what: Forgetting | None, block_ids: Sequence[bytes], ended: Ended) -> None:
        writes = {
            ticket
            for ticket, node in self._writes.items()
            if what is None or what.names(node.namespace)
        }
        self._erasures.ask(next(self._tickets), what, block_ids, writes, self.now(), ended)

    def close(self) -> None:
        """Finish writes under way and close the store."""
        self.drain()
        self._io.close()
        if self.ends is not None:
            self.ends.close()

    def _end_write(self, node: BlockNode, done: BlockDone) -> None:
        self._host.unpin([node])
        self._writing.discard(node.block_id)
        count_write(self.counters, done)
        self._can_write = done.outcome in GOOD
        if self._can_write:
            node.below = True
            return
        self._unsaved[node.block_id] = None
        if len(self._unsaved) > MOST_UNSAVED:
            del self._unsaved[next(iter(self._unsaved))]
