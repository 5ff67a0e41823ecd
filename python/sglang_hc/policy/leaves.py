"""The leaves of a tier in the order in which they should leave."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

Key = tuple[float, ...]
"""Least leaves first; keys of one policy have one length."""


class Stamped(Protocol):
    """stamp: number of the one heap item that stands for it; 0 for none."""

    stamp: int


E = TypeVar("E", bound=Stamped)

Item = tuple[Key, int, E]
"""A leaf with its key, and the stamp that its entry had; stale once the entry has another."""


class Leaves(Generic[E]):
    """Leaves by key, least first.

    The item that was pushed last stays beside the heap. While a path comes from its start, each
    block gets a child at once; while one leaves from its end, each parent is the next to leave. So
    neither costs an operation on the heap.
    """

    def __init__(self) -> None:
        self._heap: list[Item[E]] = []
        self._latest: Item[E] | None = None

    def __len__(self) -> int:
        return len(self._heap) + (self._latest is not None)

    def push(self, key: Key, entry: E, live: int) -> None:
        """live: number of entries. Stale items are dropped once they far outnumber the entries."""
        before, self._latest = self._latest, (key, entry.stamp, entry)
        if before is not None and before[2].stamp == before[1]:
            heappush(self._heap, before)
            if len(self._heap) > 4 * live + 64:
                self._heap = [item for item in self._heap if item[2].stamp == item[1]]
                heapify(self._heap)

    def top(self) -> Item[E] | None:
        """The first that is not stale. It stays until its entry has another stamp."""
        heap, latest = self._heap, self._latest
        while heap and heap[0][2].stamp != heap[0][1]:
            heappop(heap)
        if latest is not None and latest[2].stamp == latest[1]:
            return heap[0] if heap and heap[0] < latest else latest
        return heap[0] if heap else None
