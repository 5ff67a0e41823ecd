"""Eviction policies: in which order blocks leave a tier (AttentionStore section 3.3.2).

One interface for the host tier and the simulated tiers; the device (srt/tree/device_eviction.py)
and the disk (store/disk/eviction.py) order their own units by the same window. Only leaves leave,
because a block without its parent cannot be reached. A block in use (`pins`) or pinned for a
session (policy/pins.py) stays.

    queue  what no waiting request needs leaves first, of that what is retained least
           (policy/soft_retention.py), by age, over a loop the youngest (policy/set_dueling.py);
           then what is needed last
    lru    least recently used first

All cost O(log n) amortised per call; `victims` O(log n) per block plus the blocks it passes over.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.set_dueling import SetDueling

POLICIES = ("queue", "lru")

Key = tuple[float, ...]
"""Least leaves first; keys of one policy have one length."""

OUTDATED, NOT_NEEDED, NEEDED = -math.inf, 0.0, 1.0
"""First part of the keys: what other weights made, what nobody asks for, and what a waiting request
needs. How much a block is wanted (`Wanted`) is between the first and the last."""


class Block(Protocol):
    """What a policy sees of a block of some tier."""

    @property
    def block_id(self) -> bytes: ...
    @property
    def parent(self) -> Block | None: ...
    @property
    def pins(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def is_leaf(self) -> bool: ...


B = TypeVar("B", bound=Block)

IsProtected = Callable[[B], bool]
"""Whether a block must not make room this time."""


class NextUse(Protocol):
    """Who needs a block next: the look-ahead window, or `pins.RetentionPriority`."""

    def __len__(self) -> int:
        """0: nobody needs any block."""

    def next_use(self, block_id: bytes) -> float | None:
        """Rank of the first request that needs it, smaller is sooner; None for nobody."""

    def subscribe(self, listener: Callable[[Sequence[bytes]], None]) -> None:
        """Call `listener(block_ids)` after the `next_use` of these blocks has changed."""


class PinnedBlocks(Protocol):
    """Who must not leave for now, e.g. `pins.SessionPins`."""

    def __len__(self) -> int:
        """0: every block may leave."""

    def is_pinned(self, block_id: bytes) -> bool: ...
    def subscribe(self, listener: Callable[[bytes], None]) -> None:
        """Call `listener(block_id)` after each change of `is_pinned`."""


class Wanted(Protocol):
    """How much blocks are wanted that no waiting request needs, e.g. `SoftRetention`."""

    def value(self, block_id: bytes) -> float:
        """Less than 1; what has the least leaves first. 0 is as usual."""

    def subscribe(self, listener: Callable[[Sequence[bytes]], None]) -> None:
        """Call `listener(block_ids)` after the `value` of these blocks has changed."""


@dataclass(eq=False, slots=True)
class Entry(Generic[B]):
    """A block in its tier. used: tick of its policy. stamp: number of the one heap item that stands
    for it; 0 for none. since: clock of the duels at the last use, for `QueuePolicy`."""

    block: B
    used: int
    stamp: int = 0
    since: int = 0


Item = tuple[Key, int, Entry[B]]
"""A leaf with its key, and the stamp that its entry had; stale once the entry has another."""


class Leaves(Generic[B]):
    """Leaves by key, least first.

    The item that was pushed last stays beside the heap. While a path comes from its start, each
    block gets a child at once; while one leaves from its end, each parent is the next to leave. So
    neither costs an operation on the heap.
    """

    def __init__(self) -> None:
        self._heap: list[Item[B]] = []
        self._latest: Item[B] | None = None

    def __len__(self) -> int:
        return len(self._heap) + (self._latest is not None)

    def push(self, key: Key, entry: Entry[B], live: int) -> None:
        """live: number of entries. Stale items are dropped once they far outnumber the entries."""
        before, self._latest = self._latest, (key, entry.stamp, entry)
        if before is not None and before[2].stamp == before[1]:
            heappush(self._heap, before)
            if len(self._heap) > 4 * live + 64:
                self._heap = [item for item in self._heap if item[2].stamp == item[1]]
                heapify(self._heap)

    def top(self) -> Item[B] | None:
        """The first that is not stale. It stays until its entry has another stamp."""
        heap, latest = self._heap, self._latest
        while heap and heap[0][2].stamp != heap[0][1]:
            heappop(heap)
        if latest is not None and latest[2].stamp == latest[1]:
            return heap[0] if heap and heap[0] < latest else latest
        return heap[0] if heap else None


class EvictionPolicy(ABC, Generic[B]):
    """Blocks of one tier in the order they should leave. Subclasses give the key.

    Not thread-safe. Uses are ordered by the calls themselves. Blocks are told apart by
    `block_id`: one per tier.
    """

    by_need = False
    """Whether victims come in the order of need. If one is protected from making room, all later
    ones are."""

    def __init__(self, pinned: PinnedBlocks | None = None) -> None:
        """pinned: blocks that must stay for now. One that comes up as a victim is put aside until
        its pin ends, so that it costs nothing meanwhile."""
        self._pinned = pinned
        self._aside: set[bytes] = set()
        if pinned is not None:
            pinned.subscribe(self._pin_changed)
        self._entries: dict[bytes, Entry[B]] = {}
        self.has = self._entries.__contains__
        """Whether a block is in the tier. Asked often in every pass."""
        self._order: Leaves[B] = Leaves()
        self._ticks = 0
        self._is_outdated: IsProtected[B] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def items(self) -> int:
        """Items of the order, stale ones included: at most a few times the blocks."""
        return len(self._order)

    @property
    def has_pins(self) -> bool:
        return self._pinned is not None and len(self._pinned) > 0

    def is_pinned(self, block: B) -> bool:
        """Whether a block must stay for now."""
        return self._pinned is not None and self._pinned.is_pinned(block.block_id)

    def insert(self, block: B) -> None:
        """A block has come into the tier, below its parent."""
        self._ticks += 1
        entry = Entry(block, self._ticks)
        self._entries[block.block_id] = entry
        self._entered(entry)
        parent = block.parent
        above = self._entries.get(parent.block_id) if parent is not None else None
        if above is not None:
            above.stamp = 0  # no leaf any more; comes back when its last child leaves
        self._push(entry)

    def access(self, path: Sequence[B]) -> None:
        """Blocks of one path were used, root first."""
        self._ticks += 1
        for block in path:
            entry = self._entries.get(block.block_id)
            if entry is not None:
                entry.used = self._ticks
                self._used(entry)
                if block.is_leaf:
                    self._push(entry)

    def remove(self, block: B) -> None:
        """A block has left the tier and its tree. Raises KeyError if it was not in the tier."""
        entry = self._entries.pop(block.block_id)
        entry.stamp = 0
        self._aside.discard(block.block_id)
        parent = block.parent
        if parent is not None and parent.is_leaf:
            above = self._entries.get(parent.block_id)
            if above is not None:
                self._push(above)

    def outdate(self, is_outdated: Callable[[B], bool]) -> None:
        """What this holds for leaves before all others, as long as nothing else is said here."""
        self._is_outdated = is_outdated
        for entry in self._entries.values():
            if entry.block.is_leaf:
                self._push(entry)

    def is_outdated(self, block: B) -> bool:
        """Whether this holds: then nobody's pin or wish keeps the block."""
        return self._is_outdated is not None and self._is_outdated(block)

    def victims(self) -> Iterator[B]:
        """Leaves in the order they should leave.

        The caller may take each one out before it asks for the next; its parent, if it has become a
        leaf, is then a candidate too. Blocks that are not taken out keep their place.
        """
        aside: list[Entry[B]] = []
        try:
            while (entry := self._first()) is not None:
                entry.stamp = 0  # takes it out of the order
                block = entry.block
                if self.is_pinned(block) and self._rank(entry) != OUTDATED:
                    self._aside.add(block.block_id)
                    continue
                aside.append(entry)
                if not block.pins:
                    yield block
        finally:
            for entry in aside:
                known = self._entries.get(entry.block.block_id) is entry
                if known and not entry.stamp and entry.block.is_leaf:
                    self._push(entry)

    @abstractmethod
    def _key(self, entry: Entry[B]) -> Key: ...

    def _rank(self, entry: Entry[B]) -> float:
        """First part of the key of what nobody needs."""
        return OUTDATED if self.is_outdated(entry.block) else NOT_NEEDED

    def _entered(self, entry: Entry[B]) -> None:
        """For subclasses: a block came in."""

    def _used(self, entry: Entry[B]) -> None:
        """For subclasses: a block was used."""

    def _pin_changed(self, block_id: bytes) -> None:
        if block_id in self._aside:
            self._aside.discard(block_id)
            entry = self._entries[block_id]
            if entry.block.is_leaf:
                self._push(entry)

    def _push(self, entry: Entry[B]) -> Key:
        """The leaf joins the order, or changes its place in it. Returns its key."""
        self._ticks += 1
        entry.stamp = self._ticks
        key = self._key(entry)
        self._order.push(key, entry, len(self._entries))
        return key

    def _first(self) -> Entry[B] | None:
        """The leaf that should leave first."""
        item = self._order.top()
        return None if item is None else item[2]


class LruPolicy(EvictionPolicy[B]):
    """Least recently used first."""

    def _key(self, entry: Entry[B]) -> Key:
        return self._rank(entry), entry.used


def _whole(block: Block) -> bytes:
    """The identity by which a block is known when it comes back. A tail comes back longer, under
    another identity, so its parent stands for it."""
    parent = block.parent
    if parent is None or block.num_tokens == BLOCK_TOKENS:
        return block.block_id
    return parent.block_id


class QueuePolicy(EvictionPolicy[B]):
    """The waiting queue decides (AttentionStore section 3.3.2), per block.

    Blocks needed inside the look-ahead window leave only when nothing else is left, the one needed
    last first; outdated ones leave first. Of the others that are wanted least the oldest leaves,
    or, where blocks as old as it are mostly used before the youngest (`SetDueling`), the youngest.
    """

    by_need = True

    def __init__(
        self, window: NextUse, pinned: PinnedBlocks | None = None, wanted: Wanted | None = None
    ) -> None:
        super().__init__(pinned)
        self._window = window
        self._wanted = wanted
        self._duels = SetDueling()
        self._young: Leaves[B] = Leaves()
        window.subscribe(self._need_changed)
        if wanted is not None:
            wanted.subscribe(self._need_changed)

    def _entered(self, entry: Entry[B]) -> None:
        self._duels.entered(entry.block.block_id, len(self._entries))
        entry.since = self._duels.clock

    def _used(self, entry: Entry[B]) -> None:
        self._duels.used(entry.block.block_id, entry.since, len(self._entries))
        entry.since = self._duels.clock

    def _push(self, entry: Entry[B]) -> Key:
        key = super()._push(entry)
        if key[0] < NEEDED:
            self._young.push((key[0], -entry.used), entry, len(self._entries))
        return key

    def _first(self) -> Entry[B] | None:
        item = self._order.top()
        if item is None:
            return None
        key, _, first = item
        plain = 0 <= key[0] < NEEDED
        return self._preferred_to(first) or first if plain else first

    def _preferred_to(self, oldest: Entry[B]) -> Entry[B] | None:
        """The youngest, where it should leave before the oldest. Now and then both begin a duel."""
        duels, age = self._duels, self._duels.clock - oldest.since
        if duels.may_begin and (item := self._young.top()) is not None:
            old_id, young_id = _whole(oldest.block), _whole(item[2].block)
            duels.begin(old_id, age, young_id, len(self._entries))
        if duels.old_wins(age) and (item := self._young.top()) is not None:
            return item[2]
        return None

    def _key(self, entry: Entry[B]) -> Key:
        use = self._window.next_use(entry.block.block_id)
        return (self._rank(entry), entry.used) if use is None else (NEEDED, -use)

    def _rank(self, entry: Entry[B]) -> float:
        rank = super()._rank(entry)
        if rank == OUTDATED or self._wanted is None:
            return rank
        return self._wanted.value(entry.block.block_id)

    def _need_changed(self, block_ids: Sequence[bytes]) -> None:
        for entry in map(self._entries.get, block_ids):
            if entry is not None and entry.block.is_leaf:
                self._push(entry)


def make_policy(
    name: str, window: NextUse, pinned: PinnedBlocks | None = None, wanted: Wanted | None = None
) -> EvictionPolicy[B]:
    """Policy by its name in `--hc-eviction`. Raises ValueError that lists the names. wanted: for
    `queue`."""
    if name == "queue":
        return QueuePolicy(window, pinned, wanted)
    if name == "lru":
        return LruPolicy(pinned)
    raise ValueError(f"eviction policy {name!r} is not one of {', '.join(POLICIES)}")
