"""Look-ahead windows over the waiting queue (AttentionStore section 3.3).

    prefetch window  L_pw = C_mem / S_kv               requests whose state is fetched early
    eviction window  L_ev = (C_mem + C_disk) / S_kv    requests whose state is kept

S_kv is a running mean of one request's stored state. The paper's unit is a whole session; here it
is the block, and a block that several waiting requests share counts with its earliest use.

Pure: no clock, no I/O. `LookAhead` is told the waiting queue once per scheduler pass, and is the
one place that compares it with the queue of the pass before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sglang_hc.queue.requests import RequestTable, Serial, departed, without

EVICTION_STRETCH = 4.0
"""Eviction windows in use are this many times the paper's (C_mem + C_disk) / S_kv.

Beyond the paper's window the queue still says what is needed last. With a longer queue, evicting by
age there throws out first what enters the window next; see docs/decisions.md.
"""

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
class QueueChange:
    """What a pass changed, in queue order. departed: requests that are no longer in the queue.
    entered, left: those that came into the window and those that left it, whether or not they have
    left the queue."""

    departed: Sequence[Serial] = ()
    entered: Sequence[Serial] = ()
    left: Sequence[Serial] = ()


class LookAhead:
    """The order of the waiting queue; which blocks its first requests, those inside the eviction
    window, need, and how soon.

    A request has a rank, a number that grows along the queue. Ranks of requests that stay do not
    change when the head leaves or the tail grows, so a pass in which nothing else happened costs a
    comparison of lists and the blocks of the requests that came and went.
    """

    def __init__(self) -> None:
        self.requests = RequestTable()
        self.queue: tuple[Serial, ...] = ()
        """The queue of the last `update`, without those who have left the window since."""
        self._length = 0
        self._users: dict[bytes, list[float]] = {}
        self._listeners: list[Callable[[Sequence[bytes]], None]] = []

    @property
    def order(self) -> Sequence[Serial]:
        """Requests of the window, head first."""
        return self.queue[: self._length]

    def __len__(self) -> int:
        return self._length

    def __contains__(self, request: Serial) -> bool:
        return self.rank(request) is not None

    def rank(self, request: Serial) -> float | None:
        """Place of a request; smaller is sooner. None outside the window."""
        record = self.requests.get(request)
        return None if record is None else record.rank

    def next_use(self, block_id: bytes) -> float | None:
        """Rank of the first request of the window that needs this block; None if none does."""
        users = self._users.get(block_id)
        return users[0] if users else None

    def subscribe(self, listener: Callable[[Sequence[bytes]], None]) -> None:
        """Call `listener(block_ids)` after the `next_use` of these blocks has changed."""
        self._listeners.append(listener)

    def update(
        self, queue: Sequence[Serial], length: int, blocks_of: Callable[[Serial], Sequence[bytes]]
    ) -> QueueChange:
        """Look at the first `length` requests of the waiting queue, the next to be served first.

        `blocks_of` is asked once per request, when it enters, and gives distinct block ids. Records
        of requests that have departed stay until `leave`. O(n), plus the blocks of the requests
        that entered, left or changed their order; O(1) when the queue is the tuple of the last
        call.
        """
        old, new, before = self.queue, tuple(queue), self._length  # a tuple is not copied
        length = min(length, len(new))
        if length == before and (new is old or new == old):
            return QueueChange()
        gone = departed(old, new)
        grown = gone is not None
        if gone is None:
            coming = set(new)
            gone = [at for at, request in enumerate(old) if request not in coming]
            grown = without(old, gone) == list(new[: len(old) - len(gone)])
        self.queue, self._length = new, length
        window, left = self.order, [old[at] for at in gone if at < before]
        if grown:
            kept = before - len(left)  # the first of the new queue
            left += new[length:kept]
            entered, moved = list(new[kept:length]), []
        else:
            inside = set(window)
            left = [request for request in old[:before] if request not in inside]
            entered = [request for request in window if request not in self]
            moved = self._moved(window)
        for request in (*left, *moved):
            self._withdraw(request)
        for request in entered:
            record = self.requests[request]
            if record.needs is None:
                record.needs = blocks_of(request)
        self._place(entered if grown else [r for r in window if r not in self], appended=grown)
        return QueueChange([old[at] for at in gone], entered, left)

    def leave(self, request: Serial) -> None:
        """The request waits no longer: it leaves the window and its record ends. The one place
        where a request leaves. Nothing happens if it is unknown."""
        if request in self:
            at = self.queue.index(request)
            self.queue = self.queue[:at] + self.queue[at + 1 :]
            self._length -= 1
            self._withdraw(request)
        self.requests.left(request)

    def check_integrity(self) -> None:
        """Raise AssertionError unless ranks follow the order and uses are exactly the needs."""
        assert set(self.order) == {r for r in self.requests if self.rank(r) is not None}
        records = [self.requests[request] for request in self.order]
        ranks = [record.rank for record in records if record.rank is not None]
        assert all(a < b for a, b in pairwise(ranks))
        expected: dict[bytes, list[float]] = {}
        for rank, record in zip(ranks, records, strict=True):
            for block_id in record.needs or ():
                insort(expected.setdefault(block_id, []), rank)
        assert expected == self._users

    def _moved(self, new: Sequence[Serial]) -> list[Serial]:
        """The fewest requests that must change their rank for the new order."""
        stayed = [(rank, request) for request in new if (rank := self.rank(request)) is not None]
        ranks = [rank for rank, _ in stayed]
        if all(a < b for a, b in pairwise(ranks)):
            return []
        kept = _longest_increasing(ranks)
        return [request for i, (_, request) in enumerate(stayed) if i not in kept]

    def _place(self, waiting: list[Serial], *, appended: bool) -> None:
        """Give ranks to the requests that have none, between their neighbours in the order."""
        if not waiting:
            return
        if appended:
            kept = self._length - len(waiting)
            start = (self.rank(self.queue[kept - 1]) or 0.0) if kept else 0.0
            for step, request in enumerate(waiting, 1):
                self._announce(request, start + step)
            return
        for request, rank in _between([(request, self.rank(request)) for request in self.order]):
            if rank is None:
                self._renumber()
                break
            self._announce(request, rank)

    def _renumber(self) -> None:
        """Ranks 1, 2, 3 ... along the order: the gaps have become too small."""
        for request in self.order:
            if request in self:
                self._withdraw(request)
        for rank, request in enumerate(self.order, 1):
            self._announce(request, float(rank))

    def _announce(self, request: Serial, rank: float) -> None:
        """The request takes this rank; whoever listens is told of each block's sooner use."""
        users_of, record = self._users, self.requests[request]
        record.rank = rank
        changed = []
        for block_id in record.needs or ():
            users = users_of.get(block_id)
            if users is None:
                users_of[block_id] = [rank]
            else:
                insort(users, rank)
                if users[0] != rank:
                    continue
            changed.append(block_id)
        self._tell(changed)

    def _withdraw(self, request: Serial) -> None:
        """The request loses its rank."""
        users_of, record = self._users, self.requests[request]
        assert record.rank is not None
        rank, record.rank = record.rank, None
        changed = []
        for block_id in record.needs or ():
            users = users_of[block_id]
            if len(users) == 1:
                del users_of[block_id]
            else:
                place = bisect_left(users, rank)
                del users[place]
                if place:
                    continue
            changed.append(block_id)
        self._tell(changed)

    def _tell(self, changed: Sequence[bytes]) -> None:
        if changed:
            for listener in self._listeners:
                listener(changed)


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


def _between(order: Sequence[tuple[Serial, float | None]]) -> list[tuple[Serial, float | None]]:
    """Ranks for the requests of (request, rank) in `order` that have none; None when the gap
    between two ranks is used up."""
    placed: list[tuple[Serial, float | None]] = []
    run: list[Serial] = []
    below: float | None = None
    for request, rank in order:
        if rank is None:
            run.append(request)
            continue
        if run:
            start = below if below is not None else rank - len(run) - 1
            step = (rank - start) / (len(run) + 1)
            placed += [
                (name, start + i * step if step > _MIN_GAP else None)
                for i, name in enumerate(run, 1)
            ]
            run = []
        below = rank
    start = below if below is not None else 0.0
    return placed + [(name, start + i) for i, name in enumerate(run, 1)]
