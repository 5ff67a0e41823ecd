"""Ends below the host tier: end parts are written there once, and come back with their blocks.

    write    a part whose bytes are in place is written, as a block of its own without tokens, which
             continues its block, under the fingerprint of end parts (`forms.EndLayout.fingerprint`)
    find     the last end of a path that can be had: of each block that it needs the part is in host
             memory or below
    fetch    the parts that host memory lacks are read into staged slots, while the blocks come;
             when all are there the path has the end. One that cannot be read or verified, or a
             block that does not come, costs the end: the request goes on behind an earlier one

All methods belong to the scheduler thread and never wait, except `drain` and `close`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.eviction import IsProtected
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone, BlockIo
from sglang_hc.store.disk.format import clip_label
from sglang_hc.store.erasures import Ended, Erasures
from sglang_hc.store.executor import DRAIN_S
from sglang_hc.store.outcome import GOOD, Outcome
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.ends import End, EndPart, Ends
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import BlockPath, block_id
from sglang_hc.tree.promotions import Promotions

logger = logging.getLogger(__name__)

READ_DEADLINE_S = 10.0
WRITE_DEADLINE_S = 30.0
"""Longest that a part may wait to be read, and to be written: it holds its slot meanwhile."""

LOOKED_BACK = 512
"""So many blocks before the last one that is known an end is looked for."""

ASKED = 4
"""Of so many of these a store is asked that does not say by itself what it has: conversations come
back at their last end."""


class FoundEnd(NamedTuple):
    """The last end of a path that can be had. blocks: up to it; 0 for none. usable: blocks up to
    the end that host memory has. lacking: numbers of blocks whose parts have to be read."""

    blocks: int
    usable: int
    lacking: tuple[int, ...]


@dataclass(eq=False)
class _Fetch:
    """The parts of an end on their way. name: by which those who wait know it, the identity of the
    end's own part. slots: by the numbers of their blocks. kept: parts that are there, pinned.
    under_way: reads that are not answered. lost: the path will not have the end."""

    name: bytes
    path: BlockPath
    blocks: int
    slots: dict[int, int]
    kept: list[EndPart]
    under_way: int
    source: SourceTier = SourceTier.HOST
    lost: bool = False
    block_ids: frozenset[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.block_ids = frozenset(self.path.block_ids[: self.blocks])


class EndsBelow:
    """Writes end parts through, and fetches ends again. A part of `LowerTier.ends`."""

    def __init__(
        self,
        io: BlockIo,
        ends: Ends,
        host: HostTier,
        coming: Promotions,
        clock: Callable[[], float] = time.monotonic,
        is_kept: Callable[[BlockNode], bool] = lambda node: True,
        pause: Callable[[], None] = lambda: time.sleep(0.001),
    ) -> None:
        """io: of end parts, over their pool. coming: blocks on their way into host memory. is_kept:
        whether the part of a block may be written. pause: see `LowerTier`."""
        self._io = io
        self._ends = ends
        self._host = host
        self._coming = coming
        self._now = clock
        self._is_kept = is_kept
        self._pause = pause
        self._name = ends.layout.fingerprint(host.tree.fingerprint)
        self._tickets = itertools.count(1)
        self._writes: dict[int, EndPart] = {}
        self._reads: dict[int, tuple[_Fetch, int]] = {}
        """With the slot."""
        self._fetches: dict[bytes, _Fetch] = {}
        self._given_up: dict[int, int] = {}
        """Slots by the tickets of operations that were given up and not answered since."""
        self._erasures = Erasures(io)
        self._on_ended: list[Callable[[bytes, bool], object]] = []
        self.counters = io.counts
        ends.on_ready = self.write_through
        coming.subscribe(lambda block_ids: self._go_on(), self._block_lost)

    def subscribe(self, on_ended: Callable[[bytes, bool], object]) -> None:
        """Each end that is fetched is named once, by the name that `fetch` gave, with whether the
        path has it now."""
        self._on_ended.append(on_ended)

    def part_id(self, name: bytes) -> bytes:
        """Identity of the end part of the block with this identity."""
        return block_id(self._name, name, b"")

    # -- write through ---------------------------------------------------------------------------

    def write_through(self, part: EndPart) -> None:
        """The bytes of a part are in place: write it, unless it came from below."""
        node, name = part.node, self.part_id(part.node.block_id)
        if part.source is not SourceTier.HOST or part in self._writes.values():
            return
        if not self._io.wants(name, had=part.below) or not self._is_kept(node):
            return
        label, position = clip_label(node.namespace or ""), len(node.path()) - 1
        block = Block(name, node.block_id, label, position, b"")
        ticket = next(self._tickets)
        self._io.write(ticket, block, part.slot, self._now() + WRITE_DEADLINE_S)
        self._ends.pin((part,))
        self._writes[ticket] = part

    # -- fetch -----------------------------------------------------------------------------------

    def find(self, path: BlockPath, known: int) -> FoundEnd | None:
        """The last end among the first `known` blocks of a path, which are in host memory or below;
        None when that is not known yet, but soon."""
        nodes = self._ready(path, known)
        usable = self._ends.deepest(nodes)
        asked = 0
        for blocks in range(known, max(usable, known - LOOKED_BACK), -1):
            if asked == ASKED and not self._has_own_part(path, nodes, blocks):
                continue  # most blocks are no end, and a window has many parts
            lacking = self._lacking(nodes, blocks)
            names = [self.part_id(path.block_ids[number]) for number in lacking]
            if names[0] in self._fetches or self._contains(names):
                return FoundEnd(blocks, usable, tuple(lacking))
            if asked < ASKED:
                asked += 1
                if self._io.ask(names):
                    return None
        return FoundEnd(usable, usable, ())

    def fetch(
        self, path: BlockPath, found: FoundEnd, is_protected: IsProtected[End] | None = None
    ) -> bytes | None:
        """Start reading the parts that an end lacks. Returns the name of the end, by which its
        arrival is told; None where there is no room for the parts, or nothing is lacking. Its
        blocks are in host memory or on their way there."""
        if not found.lacking:
            return None
        name = self.part_id(path.block_ids[found.blocks - 1])
        if name in self._fetches:
            return name
        nodes = self._ready(path, found.blocks)
        first = max(0, found.blocks - self._ends.layout.blocks)
        kept = [node.end for node in nodes[first:] if node.end is not None]
        self._ends.pin(kept)  # making room must not cost what the end needs as well
        slots: dict[int, int] = {}
        for number in found.lacking:
            slot = self._ends.stage(is_protected)
            if slot is None:
                for staged in slots.values():
                    self._ends.unstage(staged)
                self._ends.unpin(kept)
                return None
            slots[number] = slot
        fetch = _Fetch(name, path, found.blocks, slots, kept, len(slots))
        self._fetches[name] = fetch
        deadline = self._now() + READ_DEADLINE_S
        for number, slot in slots.items():
            ticket = next(self._tickets)
            self._reads[ticket] = fetch, slot
            self._io.read(ticket, self.part_id(path.block_ids[number]), slot, deadline)
        return name

    def touch(self, path: Sequence[BlockNode]) -> None:
        """A path of whole blocks was used: so were the parts of its last end."""
        parts = self._ends.parts(path, self._ends.deepest(path))
        if parts:
            self._io.touch([self.part_id(part.node.block_id) for part in parts])

    # -- upkeep ----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Apply what is done."""
        self._take_in(self._io.poll())

    @property
    def is_busy(self) -> bool:
        """Whether answers are on their way."""
        return bool(self._moving or len(self._erasures))

    def levels(self) -> dict[str, int]:
        """Numbers that go up and down."""
        kept = {name: n for name, n in self._io.levels().items() if name.endswith("_blocks")}
        return {name.replace("_blocks", "_end_parts"): n for name, n in kept.items()}

    def drain(self) -> None:
        """Wait until nothing is on its way to a slot or from one, for at most DRAIN_S; see
        `LowerTier.drain`."""
        until = time.monotonic() + DRAIN_S
        while self._moving:
            self.poll()
            if self._moving and time.monotonic() >= until:
                self._move_no_more()
                return
            self._pause()

    def give_up(self, names: Callable[[str | None], bool] = lambda namespace: True) -> None:
        """Paths of namespaces that `names` is true for get no end that is on its way."""
        for fetch in list(self._fetches.values()):
            if names(fetch.path.prefix.namespace):
                self._lose(fetch)

    def erase(self, what: Forgetting | None, block_ids: Sequence[bytes], ended: Ended) -> None:
        """As `LowerTier.erase`, of the parts of these blocks. Ends that are on their way do not
        come, nor those that somebody asks for meanwhile."""

        def parts_are_gone(done: Sequence[BlockDone]) -> None:
            if what is not None:
                self.give_up(what.names)
            ended(done)

        if what is not None:
            self.give_up(what.names)
        names = [self.part_id(name) for name in block_ids]
        writes = {
            ticket
            for ticket, part in self._writes.items()
            if what is None or what.names(part.node.namespace)
        }
        self._erasures.ask(next(self._tickets), what, names, writes, self._now(), parts_are_gone)

    def close(self) -> None:
        """Finish writes under way and close the store."""
        self.drain()
        self._io.close()

    # -- inner parts -----------------------------------------------------------------------------

    @property
    def _moving(self) -> int:
        return len(self._writes) + len(self._reads)

    def _ready(self, path: BlockPath, blocks: int) -> Sequence[BlockNode]:
        """Of the first so many blocks of a path those that host memory can serve."""
        match = self._host.tree.match(path.prefix.up_to(blocks)).ready
        return match.nodes[: match.tokens // BLOCK_TOKENS]

    def _contains(self, names: Sequence[bytes]) -> bool:
        return self._io.contains(names) == len(names)

    def _has_own_part(self, path: BlockPath, nodes: Sequence[BlockNode], blocks: int) -> bool:
        """Whether the last part that an end needs is there or below, or on its way."""
        if blocks <= len(nodes) and _is_there(nodes[blocks - 1].end):
            return True
        name = self.part_id(path.block_ids[blocks - 1])
        return name in self._fetches or self._contains([name])

    def _lacking(self, nodes: Sequence[BlockNode], blocks: int) -> list[int]:
        """Numbers of the blocks whose parts an end needs and host memory lacks, the last first."""
        first = max(0, blocks - self._ends.layout.blocks)
        return [
            number
            for number in range(blocks - 1, first - 1, -1)
            if not (number < len(nodes) and _is_there(nodes[number].end))
        ]

    def _take_in(self, ended: Iterable[BlockDone]) -> None:
        for done in ended:
            if done.ticket in self._given_up:
                self._ends.give_back([self._given_up.pop(done.ticket)])
            elif not self._erasures.take(done):
                self._end_move(done)
        self._go_on()
        if len(self._erasures):
            self._erasures.go_on(self._writes.keys(), self._now())

    def _end_move(self, done: BlockDone) -> None:
        """A read or a write is over."""
        if done.outcome is Outcome.STUCK:
            self._ends.withhold([self._slot_of(done.ticket)])
        good = done.outcome is Outcome.OK
        if done.ticket in self._writes:
            if good:
                self.counters[f"{done.tier}_saved_end_parts"] += 1
            elif done.outcome is not Outcome.DUPLICATE:
                self.counters[f"{done.tier}_write_{done.outcome.value}"] += 1
            part = self._writes.pop(done.ticket)
            part.below = done.outcome in GOOD
            self._ends.unpin((part,))
            return
        fetch, _ = self._reads.pop(done.ticket)
        fetch.under_way -= 1
        if good:
            self.counters[f"{done.tier}_loaded_end_parts"] += 1
            fetch.source = SourceTier(done.tier)
        else:
            self.counters[f"{done.tier}_read_{done.outcome.value}"] += 1
        if fetch.lost:
            self._free(fetch)
        elif not good:
            self._lose(fetch)

    def _slot_of(self, ticket: int) -> int:
        return self._writes[ticket].slot if ticket in self._writes else self._reads[ticket][1]

    def _go_on(self) -> None:
        """Ends whose parts have all come, and whose blocks are there, join their paths."""
        for fetch in list(self._fetches.values()):
            if fetch.under_way:
                continue
            nodes = self._ready(fetch.path, fetch.blocks)
            if len(nodes) == fetch.blocks:
                self._join(fetch, nodes)
            elif self._coming.block_ids.isdisjoint(fetch.block_ids):
                self._lose(fetch)  # a block has left again

    def _join(self, fetch: _Fetch, nodes: Sequence[BlockNode]) -> None:
        """A path has an end whose parts have come."""
        own = set(fetch.slots.values())
        parts = self._ends.begin(nodes, fetch.slots)
        if parts is None:
            self._lose(fetch)
            return
        del self._fetches[fetch.name]
        for part in parts:
            part.source = fetch.source
            if part.slot in own:
                own.remove(part.slot)
                self._ends.written(part)
            else:  # one that was there has left meanwhile
                self._ends.failed(part)
        for slot in own:  # somebody else brought the part
            self._ends.unstage(slot)
        self._ends.unpin(fetch.kept)
        self._tell(fetch, self._ends.deepest(nodes) == fetch.blocks)

    def _block_lost(self, name: bytes) -> None:
        for fetch in list(self._fetches.values()):
            if name in fetch.block_ids:
                self._lose(fetch)

    def _lose(self, fetch: _Fetch) -> None:
        """The path will not have the end."""
        fetch.lost = True
        del self._fetches[fetch.name]
        self._ends.unpin(fetch.kept)
        self._free(fetch)
        self._tell(fetch, False)

    def _free(self, fetch: _Fetch) -> None:
        """Give the slots of a lost end back, once nothing is on its way to them."""
        if not fetch.under_way:
            for slot in fetch.slots.values():
                self._ends.unstage(slot)

    def _tell(self, fetch: _Fetch, has_end: bool) -> None:
        for listener in self._on_ended:
            listener(fetch.name, has_end)

    def _move_no_more(self) -> None:
        slots = {ticket: self._slot_of(ticket) for ticket in (*self._writes, *self._reads)}
        logger.error("sglang-hc: given up: %d end parts not read or written in time", len(slots))
        tier = SourceTier.DISK.value
        self._take_in([BlockDone(ticket, Outcome.STUCK, tier) for ticket in slots])
        self._given_up |= slots


def _is_there(part: EndPart | None) -> bool:
    return part is not None and part.ready
