"""Eviction policies: in which order blocks leave a tier (AttentionStore section 3.3.2).

One interface for the host tier and the simulated tiers; the device (srt/eviction.py) and the disk
(store/disk/eviction.py) order their own units by the same window. Only leaves leave, because a
block without its parent cannot be reached. A block in use (`pins`) or held for a session
(policy/pins.py) stays.

    queue  what no waiting request needs leaves first, by age, size and restore cost per byte;
           then what is needed last
    lru    least recently used first         fifo  conversation that was stored first
    lfu    fewest uses first, then lru

All cost O(log n) amortised per call; `victims` O(log n) per block plus the blocks it passes over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from sglang_hc.forms import BLOCK_TOKENS

POLICIES = ("queue", "lru", "fifo", "lfu")

Key = tuple[float, ...]
"""Least leaves first; keys of one policy have one length."""


class Block(Protocol):
    """What a policy sees of a block of some tier."""

    @property
    def block_id(self) -> bytes: ...
    @property
    def parent(self) -> Block | None: ...
    @property
    def pins(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def is_leaf(self) -> bool: ...


B = TypeVar("B", bound=Block)


class NextUse(Protocol):
    """What the queue policy asks of the look-ahead window."""

    def next_use(self, block_id: bytes) -> float | None: ...
    def subscribe(self, listener: Callable[[bytes], None]) -> None: ...


class Holds(Protocol):
    """Who must not leave for now, e.g. `pins.SessionPins`."""

    def holds(self, block_id: bytes) -> bool: ...
    def subscribe(self, listener: Callable[[bytes], None]) -> None:
        """Call `listener(block_id)` after each change of `holds`."""


class Entry(Generic[B]):
    """A block in its tier. `stamp`: number of the one heap item that stands for it; 0 for none.

    grown: it has or had a child. here: it has not left the tier.
    """

    __slots__ = ("block", "born", "grown", "here", "stamp", "used", "worth")

    def __init__(self, block: B) -> None:
        self.block = block
        self.here = True
        self.grown = False
        self.stamp = 0
        self.used = 0
        self.born = 0
        self.worth = 0.0


class EvictionPolicy(ABC, Generic[B]):
    """Blocks of one tier in the order they should leave. Subclasses give the key.

    Not thread-safe. Uses are ordered by the calls themselves, so the clock need not be fine. Blocks
    are told apart by `block_id`: one per tier.
    """

    by_need = False
    """Victims come by need: when one must not make room for a waiting request, no later one may."""

    def __init__(self, held: Holds | None = None) -> None:
        """`held`: blocks that must stay for now. They are put aside when they come up, and are
        in the running again when they are let go, so that they cost nothing meanwhile."""
        self._held = held
        self._aside: set[bytes] = set()
        if held is not None:
            held.subscribe(self._hold_changed)
        self._entries: dict[bytes, Entry[B]] = {}
        self._heap: list[tuple[Key, int, Entry[B]]] = []
        self._fresh: list[Entry[B]] = []
        self._ticks = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: bytes) -> bool:
        return block_id in self._entries

    def insert(self, block: B, now: float) -> None:
        """A block has come into the tier, below its parent."""
        entry = Entry(block)
        self._ticks += 1
        entry.used = entry.born = self._ticks
        self._entries[block.block_id] = entry
        parent = block.parent
        above = self._entries.get(parent.block_id) if parent is not None else None
        self._entered(entry, above)
        if above is not None:
            above.grown = True
            above.stamp = 0  # no leaf any more; comes back when its last child leaves
        self._fresh.append(entry)
        if len(self._fresh) > 2 * len(self._entries) + 64:  # nobody asks for victims
            self._sort_in()

    def access(self, path: Sequence[B], now: float) -> None:
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
        """A block has left the tier, already taken out of the tree. KeyError if it was not here."""
        entry = self._entries.pop(block.block_id)
        entry.here, entry.stamp = False, 0
        self._aside.discard(block.block_id)
        parent = block.parent
        if parent is not None and parent.is_leaf:
            above = self._entries.get(parent.block_id)
            if above is not None:
                self._push(above)

    def victims(self) -> Iterator[B]:
        """Leaves in the order they should leave.

        The caller may take each one out before it asks for the next: the parent it uncovers is then
        in the running too. Blocks that are not taken out stay where they were.
        """
        self._sort_in()
        aside: list[tuple[Key, int, Entry[B]]] = []
        heap = self._heap
        try:
            while heap:
                item = heappop(heap)
                entry = item[2]
                if entry.stamp != item[1]:
                    continue
                block = entry.block
                if self._held is not None and self._held.holds(block.block_id):
                    self._aside.add(block.block_id)
                    entry.stamp = 0
                    continue
                aside.append(item)
                if block.pins:
                    continue
                self._chosen(entry, item[0])
                yield block
        finally:
            for item in aside:
                if item[2].stamp == item[1]:
                    heappush(heap, item)

    @abstractmethod
    def _key(self, entry: Entry[B]) -> Key: ...

    def _entered(self, entry: Entry[B], above: Entry[B] | None) -> None:
        """A subclass' own note on a new block below `above`."""

    def _used(self, entry: Entry[B]) -> None:
        """A subclass' own note on a use."""

    def _chosen(self, entry: Entry[B], key: Key) -> None:
        """A subclass' own note on a block offered as victim."""

    def _hold_changed(self, block_id: bytes) -> None:
        if block_id in self._aside:
            self._aside.discard(block_id)
            entry = self._entries[block_id]
            if entry.block.is_leaf:
                self._push(entry)

    def _sort_in(self) -> None:
        """New leaves join the order. Late, because most new blocks get a child at once."""
        for entry in self._fresh:
            if entry.here and entry.block.is_leaf:
                self._push(entry)
        self._fresh.clear()

    def _push(self, entry: Entry[B]) -> None:
        self._ticks += 1
        entry.stamp = self._ticks
        heap = self._heap
        heappush(heap, (self._key(entry), self._ticks, entry))
        if len(heap) > 4 * len(self._entries) + 64:  # stale items outnumber the blocks
            heap[:] = [item for item in heap if item[2].stamp == item[1]]
            heapify(heap)


class LruPolicy(EvictionPolicy[B]):
    """Least recently used first."""

    def _key(self, entry: Entry[B]) -> Key:
        return (entry.used,)


class FifoPolicy(EvictionPolicy[B]):
    """First stored, first out. A path that grows keeps the age of its first block.

    Otherwise every turn would renew a conversation's age at its leaf, and the policy would be LRU.
    """

    def _entered(self, entry: Entry[B], above: Entry[B] | None) -> None:
        if above is not None and not above.grown:  # the path goes on: the same conversation
            entry.born = above.born

    def _key(self, entry: Entry[B]) -> Key:
        return (entry.born, entry.used)


class LfuPolicy(EvictionPolicy[B]):
    """Fewest uses first (`hits` of the block, kept by its tier), then least recently used."""

    def _key(self, entry: Entry[B]) -> Key:
        return (entry.block.hits, entry.used)


def filled_share(block: Block) -> float:
    """Default worth of a block per byte: the tokens it restores over the tokens its slot could."""
    return block.num_tokens / BLOCK_TOKENS


class QueuePolicy(EvictionPolicy[B]):
    """The waiting queue decides (AttentionStore section 3.3.2), per block.

    Blocks needed inside the look-ahead window leave only when nothing else is left, the one needed
    last first. The others leave by GreedyDual-Size: worth(block) + an inflation that rises to the
    worth of what has left. That is LRU while all blocks are worth the same per byte, and lets a
    block that is dear to restore outlive a cheap one of the same age, but not for ever.
    """

    by_need = True

    def __init__(
        self,
        window: NextUse,
        worth: Callable[[B], float] = filled_share,
        held: Holds | None = None,
    ) -> None:
        """`worth`: seconds to restore the block without this tier, per byte; any fixed unit."""
        super().__init__(held)
        self._window = window
        self._worth = worth
        self._inflation = 0.0
        window.subscribe(self._need_changed)

    def _entered(self, entry: Entry[B], above: Entry[B] | None) -> None:
        self._used(entry)

    def _used(self, entry: Entry[B]) -> None:
        entry.worth = self._inflation + self._worth(entry.block)

    def _chosen(self, entry: Entry[B], key: Key) -> None:
        if key[0] == 0.0:
            self._inflation = max(self._inflation, entry.worth)

    def _key(self, entry: Entry[B]) -> Key:
        use = self._window.next_use(entry.block.block_id)
        return (0.0, entry.worth, entry.used) if use is None else (1.0, -use, 0.0)

    def _need_changed(self, block_id: bytes) -> None:
        entry = self._entries.get(block_id)
        if entry is not None and entry.block.is_leaf:
            self._push(entry)


def make_policy(
    name: str,
    window: NextUse,
    worth: Callable[[B], float] = filled_share,
    held: Holds | None = None,
) -> EvictionPolicy[B]:
    """Policy by its name in `--hc-eviction`. Raises ValueError that lists the names."""
    if name == "queue":
        return QueuePolicy(window, worth, held)
    if name == "lru":
        return LruPolicy(held)
    if name == "fifo":
        return FifoPolicy(held)
    if name == "lfu":
        return LfuPolicy(held)
    raise ValueError(f"eviction policy {name!r} is not one of {', '.join(POLICIES)}")
