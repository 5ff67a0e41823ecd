"""What a prefetch is weighed by (AttentionStore section 3.3.1).

Pure: no clock, no I/O. `prefetch.Prefetcher` decides with these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.eviction import Block, IsProtected
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.queue.lookahead import RunningMean
from sglang_hc.queue.requests import Serial
from sglang_hc.tree.identity import BlockPath


class FetchedEnd(NamedTuple):
    """The end that a fetch is for, where paths need ends (`tree.ends`). blocks: up to it. usable:
    blocks up to the end that host memory has. begin: starts to read the end parts that are lacking,
    and gives the name under which their coming is told, or None where there is no room; None where
    nothing is lacking."""

    blocks: int
    usable: int
    begin: Callable[[IsProtected[Block] | None], bytes | None] | None


@dataclass(frozen=True, slots=True)
class Missing:
    """What a fetch would bring for a waiting request: blocks [first, first + count) of its path.

    path: of its prompt. first: blocks of it in host memory, without a gap. sources: where each of
    those behind them lies, without a gap; empty when the device has their tokens. on_device: tokens
    that the device has. end: to which the fetch must come, with end parts, to be of use; None where
    each block is.
    """

    path: BlockPath
    first: int
    sources: Sequence[SourceTier]
    on_device: int
    end: FetchedEnd | None = None

    @property
    def count(self) -> int:
        return len(self.sources)

    @property
    def is_nothing(self) -> bool:
        """Neither blocks nor end parts are lacking."""
        return not self.sources and (self.end is None or self.end.begin is None)

    def saved(self, costs: RestorePlanner, first: int, end: int) -> float:
        """Seconds by which the request starts sooner when host memory has `end` blocks of the path
        and not only `first`; negative when it is better off without, or the device has them."""
        known = max(first * BLOCK_TOKENS, self.on_device)
        held = end * BLOCK_TOKENS
        if held <= known:
            return -math.inf
        new = max(1, self.path.prefix.num_tokens - held)
        return costs.saved_seconds(known - self.on_device, held - known, self.on_device, new)

    def in_time(
        self,
        costs: RestorePlanner,
        reading: Callable[[SourceTier], int],
        first: int,
        end: int,
        turn_in: float,
    ) -> tuple[int, float]:
        """Which of blocks [first, end) can be in host memory within `turn_in` seconds: their end,
        and by how many seconds the last of all blocks is late. Disk and remote store read at the
        same time, each behind the `reading` blocks that it reads already."""
        ready: dict[SourceTier, float] = {}
        begin, stop, late = first, first, 0.0
        for tier, run in groupby(self.sources[first - self.first : end - self.first]):
            blocks, per_block = len(list(run)), costs.block_seconds(tier)
            before = ready[tier] if tier in ready else reading(tier) * per_block
            ready[tier] = before + blocks * per_block
            if late <= 0.0:
                all_in_time = ready[tier] <= turn_in
                fit = blocks if all_in_time else int((turn_in - before) / per_block)
                stop = begin + max(0, fit)
            late = max(late, ready[tier] - turn_in)
            begin += blocks
        return stop, late

    def try_seconds(self, costs: RestorePlanner) -> float:
        """Longest that the request waits for a fetch that is a try; it counts as one that would
        have to compute all that the device lacks."""
        new = max(1, self.path.prefix.num_tokens - self.on_device)
        return costs.try_seconds(self.on_device, new)


class Below(Protocol):
    """The tiers, as the prefetcher sees them."""

    @property
    def coming(self) -> Collection[bytes]:
        """Identities of the blocks that are on their way to host memory."""

    def missing(self, request: Serial) -> Missing | None:
        """What a fetch would bring for a waiting request. None: not known yet, but soon."""

    def in_host(self, block_id: bytes) -> bool:
        """Whether host memory has this block."""

    def reading(self, tier: SourceTier) -> int:
        """Blocks that are being read from a tier."""

    def start(
        self,
        request: Serial,
        missing: Missing,
        first: int,
        count: int,
        is_protected: IsProtected[Block] | None,
    ) -> int:
        """Begin to fetch blocks [first, first + count) of the path: as many leading ones as find a
        slot without displacing what `is_protected` protects. Returns how many."""

    def meet(
        self,
        request: Serial,
        missing: Missing,
        end: int,
        is_protected: IsProtected[Block] | None,
    ) -> bool:
        """Begin to read the blocks before `end` of the path from the back, for a request whose turn
        has come and which computes their front meanwhile, if that is the fastest."""

    def keep_free(self, slots: int, is_protected: IsProtected[Block]) -> None:
        """Evict until so many slots of host memory are free, but no protected block."""


class TurnEstimate:
    """When a place in the queue will have its turn, from the rate of past admissions."""

    def __init__(self) -> None:
        self._seconds = RunningMean(memory=64)
        self._last: float | None = None

    def admitted(self, count: int, now: float) -> None:
        """`count` requests were admitted in the pass at `now`; 0 changes nothing."""
        if count < 1:
            return
        if self._last is not None:
            self._seconds.add((now - self._last) / count)
        self._last = now

    def idle(self) -> None:
        """The queue has run empty: the time to the next admission says nothing about the rate."""
        self._last = None

    def turn_in(self, position: int) -> float:
        """Seconds until the request at this place (0: head) is served; 0 while nothing is known."""
        return position * self._seconds.value
