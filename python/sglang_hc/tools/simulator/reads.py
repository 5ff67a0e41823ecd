"""What a simulated server reads from its disks: one transfer after the other."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tools.simulator.models import GpuCosts
from sglang_hc.tree.promotions import Promotion

Transfer = Sequence[Promotion]
"""Blocks of one request that come from disk together."""


class ReadQueue:
    """All disks together, which work on one transfer at a time at their summed rate. Times are
    seconds of the simulation."""

    def __init__(self, costs: GpuCosts) -> None:
        self._costs = costs
        self._queue: deque[tuple[float, Transfer]] = deque()
        self._free = 0.0

    def __bool__(self) -> bool:
        """Whether a transfer is not through yet."""
        return bool(self._queue)

    @property
    def next_end(self) -> float:
        """When the next transfer is through; infinite for none."""
        return self._queue[0][0] if self._queue else math.inf

    def backlog(self, now: float) -> float:
        """Seconds until a new transfer could begin."""
        return max(0.0, self._free - now)

    def begin(self, transfers: Iterable[Transfer], now: float) -> None:
        """Put these behind what is being read."""
        for transfer in transfers:
            self.occupy(BLOCK_TOKENS * len(transfer), now)
            self._queue.append((self._free, transfer))

    def occupy(self, tokens: int, now: float) -> None:
        """So many tokens are read behind what is being read; nobody is told when they are here."""
        self._free = max(self._free, now) + self._costs.read_seconds(tokens)

    def through(self, now: float) -> Iterator[tuple[float, Transfer]]:
        """Take out the transfers that are through by `now`, each with the time of its end."""
        while self.next_end <= now:
            yield self._queue.popleft()
