"""Look-ahead windows over the waiting queue (AttentionStore section 3.3).

    prefetch window  L_pw = C_mem / S_kv               requests whose state is fetched early
    eviction window  L_ev = (C_mem + C_disk) / S_kv    requests whose state is kept

S_kv is a running mean of one request's stored state. The paper's unit is a whole session; here it
is the block, and a block that several waiting requests share counts with its earliest use.

Pure: no clock, no I/O. `LookAhead` is told the waiting queue once per scheduler pass.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Generic, TypeVar

from sglang_hc.queue.requests import WaitingTable

K = TypeVar("K", bound=Hashable)
"""Name of a request."""

T = TypeVar("T")

EVICTION_STRETCH = 4.0
"""Eviction windows in use are this many times the paper's (C_mem + C_disk) / S_kv.

Beyond the paper's window the queue still says what is needed last. With a longer queue, evicting by
age there throws out first what enters the window next; see docs/decisions/queue.md.
"""

DEPARTED_WITHIN = 128
"""Places from the head of a queue within which requests are expected to leave it."""

_MIN_GAP = 1e-6
"""Ranks closer than this are renumbered; far above the spacing of floats up to 1e9."""


class RunningMean:
    """Mean of the last values, S_kv: plain mean at first, then exponential over `memory` values."""

    def __init__(self, memory: int = 256) -> None:
        if memory < 1:
            raise ValueError(f"a running mean needs a memory of at least 1 value, got {memory}")
        self._memory = memory
        self._count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, self._memory)
        self.value += (value - self.value) / self._count


def window_length(capacity_bytes: float, mean_bytes: float) -> int:
    """Requests whose state fits: C / S_kv, at least 1 while there is any capacity.

    Before the first request has been seen (mean 0) one request is looked at.
    """
    if capacity_bytes <= 0:
        return 0
    return max(1, int(capacity_bytes / mean_bytes)) if mean_bytes > 0 else 1


@dataclass(frozen=True)
class WindowChange(Generic[K]):
    """Requests that came into the window, in queue order, and those that left it."""

    entered: list[K]
    left: list[K]


class LookAhead(Generic[K]):
    """Which blocks the waiting requests inside the eviction window need, and how soon.

    A request has a rank, a number that grows along the queue. Ranks of requests that stay do not
    change when the head leaves or the tail grows, so a pass in which nothing else happened costs a
    comparison of lists and the blocks of the requests that came and went.
    """

    def __init__(self) -> None:
        self.requests: WaitingTable[K] = WaitingTable()
        self._order: list[K] = []
        self._rank: dict[K, float] = {}
        self._blocks: dict[K, Sequence[bytes]] = {}
        self._users: dict[bytes, list[float]] = {}
        self._listeners: list[Callable[[bytes], None]] = []

    @property
    def order(self) -> Sequence[K]:
        """Requests of the window, head first."""
        return self._order

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request: K) -> bool:
        return request in self._rank

    def rank(self, request: K) -> float | None:
        """Place of a request; smaller is sooner. None outside the window."""
        return self._rank.get(request)

    def next_use(self, block_id: bytes) -> float | None:
        """Rank of the first request of the window that needs this block; None if none does."""
        users = self._users.get(block_id)
        return users[0] if users else None

    def next_uses(self, blocks: Iterable[bytes]) -> dict[bytes, float | None]:
        """`next_use` of many blocks."""
        users_of = self._users
        return {block: users_of[block][0] if block in users_of else None for block in blocks}

    def subscribe(self, listener: Callable[[bytes], None]) -> None:
        """Call `listener(block_id)` after each change of a block's `next_use`."""
        self._listeners.append(listener)

    def update(
        self, queue: Sequence[K], length: int, blocks_of: Callable[[K], Sequence[bytes]]
    ) -> WindowChange[K]:
        """Look at the first `length` requests of the waiting queue, the next to be served first.

        `blocks_of` is asked once, when a request enters, and gives distinct block ids. O(length),
        plus the blocks of the requests that entered, left or changed their order.
        """
        new = list(islice(queue, length))
        old = self._order
        if new == old:
            return WindowChange([], [])
        gone = departed(old, new)
        grown = gone is not None
        if gone is None:
            coming = set(new)
            gone = [at for at, request in enumerate(old) if request not in coming]
            grown = without(old, gone) == new[: len(old) - len(gone)]
        left = [old[at] for at in gone]
        entered = new[len(old) - len(gone) :] if grown else [r for r in new if r not in self._rank]
        moved = [] if grown else self._moved(new)
        self._order = new
        for request in left:
            self._leave(request)
        for request in moved:
            self._withdraw(self._rank.pop(request), self._blocks[request])
        for request in entered:
            self._blocks[request] = blocks_of(request)
        self._place(moved, entered, appended=grown)
        return WindowChange(entered, left)

    def discard(self, request: K) -> None:
        """Forget an aborted request at once. Nothing happens if it is not in the window."""
        if request in self._rank:
            self._order.remove(request)
            self._leave(request)

    def check_integrity(self) -> None:
        """Raise AssertionError unless ranks follow the order and uses are exactly the needs."""
        ranks = [self._rank[request] for request in self._order]
        assert all(a < b for a, b in pairwise(ranks))
        assert len(self._order) == len(self._rank) == len(self._blocks)
        expected: dict[bytes, list[float]] = {}
        for request in self._order:
            for block_id in self._blocks[request]:
                insort(expected.setdefault(block_id, []), self._rank[request])
        assert expected == self._users

    def _moved(self, new: list[K]) -> list[K]:
        """The fewest requests that must change their rank for the new order."""
        stayed = [request for request in new if request in self._rank]
        ranks = [self._rank[request] for request in stayed]
        if all(a < b for a, b in pairwise(ranks)):
            return []
        kept = _longest_increasing(ranks)
        return [r for i, r in enumerate(stayed) if i not in kept]

    def _place(self, moved: list[K], entered: list[K], *, appended: bool) -> None:
        """Give ranks to the requests that have none, between their neighbours in the order."""
        waiting = entered if appended else [r for r in self._order if r not in self._rank]
        if not waiting:
            return
        if appended:
            kept = len(self._order) - len(waiting)
            start = self._rank[self._order[kept - 1]] if kept else 0.0
            for step, request in enumerate(waiting, 1):
                self._rank[request] = start + step
                self._announce(start + step, self._blocks[request])
            return
        for request, rank in _between(self._order, self._rank):
            if rank is None:
                self._renumber()
                break
            self._rank[request] = rank
            self._announce(rank, self._blocks[request])

    def _renumber(self) -> None:
        """Ranks 1, 2, 3 ... along the order: the gaps have become too small."""
        for request, rank in list(self._rank.items()):
            self._withdraw(rank, self._blocks[request])
        for rank, request in enumerate(self._order, 1):
            self._rank[request] = float(rank)
            self._announce(float(rank), self._blocks[request])

    def _leave(self, request: K) -> None:
        self._withdraw(self._rank.pop(request), self._blocks.pop(request))

    def _announce(self, rank: float, blocks: Iterable[bytes]) -> None:
        users_of = self._users
        for block_id in blocks:
            users = users_of.get(block_id)
            if users is None:
                users_of[block_id] = [rank]
            else:
                insort(users, rank)
                if users[0] != rank:
                    continue
            for listener in self._listeners:
                listener(block_id)

    def _withdraw(self, rank: float, blocks: Iterable[bytes]) -> None:
        users_of = self._users
        for block_id in blocks:
            users = users_of[block_id]
            if len(users) == 1:
                del users_of[block_id]
            else:
                place = bisect_left(users, rank)
                del users[place]
                if place:
                    continue
            for listener in self._listeners:
                listener(block_id)


def departed(old: Sequence[T], new: Sequence[T]) -> list[int] | None:
    """Places in `old` of those that have left a queue, which has else but grown at its tail.

    None for any other change, and when somebody behind the first DEPARTED_WITHIN has left. What
    stayed is compared as a whole: Python steps only as far as the last who left.
    """
    gone: list[int] = []
    at, compare = 0, True
    while at < len(old):
        place = at - len(gone)
        left = place == len(new) or old[at] != new[place]
        if left:
            gone.append(at)
        elif compare and old[at:] == new[place : place + len(old) - at]:
            break
        if at == DEPARTED_WITHIN:
            return None
        compare = left
        at += 1
    back = new[len(old) - len(gone) :]
    return gone if all(old[at] not in back for at in gone) else None


def without(items: Sequence[T], places: Sequence[int]) -> list[T]:
    """A copy of `items` that lacks those at `places`, which ascend."""
    rest = list(items)
    for at in reversed(places):
        del rest[at]
    return rest


def _longest_increasing(values: Sequence[float]) -> set[int]:
    """Indices of one longest strictly increasing subsequence. O(n log n)."""
    tails: list[float] = []
    ends: list[int] = []
    before: list[int] = []
    for index, value in enumerate(values):
        place = bisect_left(tails, value)
        before.append(ends[place - 1] if place else -1)
        if place == len(tails):
            tails.append(value)
            ends.append(index)
        else:
            tails[place], ends[place] = value, index
    kept: set[int] = set()
    index = ends[-1] if ends else -1
    while index >= 0:
        kept.add(index)
        index = before[index]
    return kept


def _between(order: Sequence[K], ranks: dict[K, float]) -> list[tuple[K, float | None]]:
    """Ranks for the requests of `order` that have none; None when the gap is used up."""
    placed: list[tuple[K, float | None]] = []
    below: float | None = None
    run: list[K] = []

    def close(above: float | None) -> None:
        if above is None:
            start = below if below is not None else 0.0
            placed.extend((request, start + i) for i, request in enumerate(run, 1))
        else:
            start = below if below is not None else above - len(run) - 1
            step = (above - start) / (len(run) + 1)
            for i, request in enumerate(run, 1):
                placed.append((request, start + i * step if step > _MIN_GAP else None))
        run.clear()

    for request in order:
        rank = ranks.get(request)
        if rank is None:
            run.append(request)
        else:
            if run:
                close(rank)
            below = rank
    if run:
        close(None)
    return placed
