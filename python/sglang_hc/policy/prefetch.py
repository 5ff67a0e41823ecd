"""Which blocks are fetched from disk ahead of their request's turn (AttentionStore section 3.3.1).

Requests are served by their expected turn, those with the same turn by the time their fetch takes.
A block is fetched once, however many requests wait for it. Of a state that cannot be ready in time
only what can is fetched, unless waiting for the rest is cheaper than recomputing it.

Pure: the caller moves bytes and tells the planner what started, ended and was given up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sglang_hc.forms import BLOCK_TOKENS

PREFETCH_MODES = ("queue", "on-arrival", "off")

K = TypeVar("K", bound=Hashable)


class FetchCosts(Protocol):
    """Seconds that the planner weighs against each other."""

    def fetch_seconds(self, num_bytes: float) -> float:
        """Disk to host."""
        ...

    def recompute_seconds(self, tokens: int, context: int) -> float:
        """Prefill of `tokens` tokens after `context` known ones."""
        ...


@dataclass(frozen=True)
class ConstantRates:
    """Costs without a measured model: bytes and tokens per second."""

    disk_bytes_per_s: float
    prefill_tokens_per_s: float

    def fetch_seconds(self, num_bytes: float) -> float:
        return num_bytes / self.disk_bytes_per_s

    def recompute_seconds(self, tokens: int, context: int) -> float:
        return tokens / self.prefill_tokens_per_s


class TurnEstimate:
    """When a place in the queue will have its turn, from the rate of past admissions."""

    def __init__(self, memory: int = 64) -> None:
        self._memory = memory
        self._count = 0
        self._seconds = 0.0
        self._last: float | None = None

    def admitted(self, count: int, now: float) -> None:
        """`count` requests were admitted in the pass at `now`; 0 changes nothing."""
        if count < 1:
            return
        if self._last is not None:
            self._count = min(self._count + 1, self._memory)
            self._seconds += ((now - self._last) / count - self._seconds) / self._count
        self._last = now

    def idle(self) -> None:
        """The queue has run empty: the time to the next admission says nothing about the rate."""
        self._last = None

    def turn_in(self, position: int) -> float:
        """Seconds until the request at this place (0: head) is served; 0 while nothing is known."""
        return position * self._seconds


@dataclass(frozen=True)
class Candidate(Generic[K]):
    """A waiting request of the prefetch window whose state lies on disk in part.

    turn_in: seconds until its turn. missing: blocks on disk and not in host memory, in path order.
    context: tokens before the first of them.
    """

    request: K
    turn_in: float
    missing: Sequence[bytes]
    context: int


@dataclass(frozen=True)
class Fetch(Generic[K]):
    """Blocks to fetch now for a request, in this order."""

    request: K
    blocks: Sequence[bytes]


class PrefetchPlanner(Generic[K]):
    """Chooses fetches and knows which are under way and for whom.

        plan -> started -> completed
                   |-> cancel (abort, finish) -> given back to the caller, once nobody waits for it

    `block_bytes`: size of one block's fetch.
    """

    def __init__(self, costs: FetchCosts, block_bytes: int) -> None:
        if block_bytes < 1:
            raise ValueError(f"a block has at least 1 byte, got {block_bytes}")
        self._costs = costs
        self._block_seconds = costs.fetch_seconds(block_bytes)
        self._waiting_for: dict[bytes, set[K]] = {}
        self._fetching: dict[K, set[bytes]] = {}

    @property
    def in_flight(self) -> int:
        """Blocks started and neither completed nor cancelled."""
        return len(self._waiting_for)

    def is_fetching(self, request: K) -> bool:
        """Whether blocks this request waits for are under way."""
        return request in self._fetching

    def is_under_way(self, block_id: bytes) -> bool:
        return block_id in self._waiting_for

    def plan(self, candidates: Iterable[Candidate[K]]) -> list[Fetch[K]]:
        """Fetches worth starting, first first. Changes only who waits for what is under way."""
        chosen: list[Fetch[K]] = []
        taken: set[bytes] = set()
        busy = len(self._waiting_for) * self._block_seconds
        ordered = sorted(candidates, key=lambda c: (c.turn_in, len(c.missing)))
        for candidate in ordered:
            fresh: list[bytes] = []
            for block_id in candidate.missing:
                if block_id in self._waiting_for:
                    self._join(candidate.request, block_id)
                elif block_id not in taken:
                    fresh.append(block_id)
            count = self._worth_fetching(candidate, len(fresh), busy)
            if count:
                blocks = fresh[:count]
                chosen.append(Fetch(candidate.request, blocks))
                taken.update(blocks)
                busy += count * self._block_seconds
        return chosen

    def started(self, request: K, blocks: Iterable[bytes]) -> None:
        """The caller has a place for these blocks and has begun to fetch them."""
        for block_id in blocks:
            self._join(request, block_id)

    def completed(self, blocks: Iterable[bytes]) -> None:
        """These blocks are in host memory, or will not come (error): nobody waits for them now."""
        for block_id in blocks:
            for request in self._waiting_for.pop(block_id, ()):
                self._release(request, block_id)

    def cancel(self, request: K) -> list[bytes]:
        """The request is aborted, finished or served. Returns the blocks nobody else waits for.

        Those are to be stopped and count as given up; a late completion of one is ignored.
        """
        alone: list[bytes] = []
        for block_id in self._fetching.pop(request, ()):
            others = self._waiting_for[block_id]
            others.discard(request)
            if not others:
                del self._waiting_for[block_id]
                alone.append(block_id)
        return alone

    def check_integrity(self) -> None:
        """Raise AssertionError unless both directions of who-waits-for-what agree."""
        for block_id, requests in self._waiting_for.items():
            assert requests and all(block_id in self._fetching[r] for r in requests)
        for request, blocks in self._fetching.items():
            assert blocks and all(request in self._waiting_for[b] for b in blocks)

    def _worth_fetching(self, candidate: Candidate[K], count: int, busy: float) -> int:
        """Leading blocks to fetch: those in time, and the rest if waiting beats recomputing."""
        per_block = self._block_seconds
        slack = candidate.turn_in - busy
        if count * per_block <= slack:
            return count
        in_time = max(0, int(slack / per_block)) if per_block else count
        context = candidate.context + in_time * BLOCK_TOKENS
        recompute = self._costs.recompute_seconds((count - in_time) * BLOCK_TOKENS, context)
        return count if count * per_block - slack <= recompute else in_time

    def _join(self, request: K, block_id: bytes) -> None:
        self._waiting_for.setdefault(block_id, set()).add(request)
        self._fetching.setdefault(request, set()).add(block_id)

    def _release(self, request: K, block_id: bytes) -> None:
        blocks = self._fetching[request]
        blocks.discard(block_id)
        if not blocks:
            del self._fetching[request]


def reserve_slots(num_slots: int, mean_blocks: float) -> int:
    """Host slots kept free by early eviction, so that a prefetch never waits for one.

    Two requests' state (the one being fetched and the next), at most a sixteenth of the tier.
    """
    return min(num_slots // 16, max(1, int(2 * mean_blocks)))


def missing_blocks(
    blocks: Sequence[bytes],
    in_host: Callable[[bytes], bool],
    on_disk: Callable[[bytes], bool],
) -> tuple[int, list[bytes]]:
    """(index of the first, ids) of a path's blocks that a fetch would bring: on disk, not in host.

    A gap on disk ends the path: what lies beyond it cannot be used.
    """
    index = 0
    while index < len(blocks) and in_host(blocks[index]):
        index += 1
    end = index
    while end < len(blocks) and on_disk(blocks[end]):
        end += 1
    return index, list(blocks[index:end])
