"""The disk tier of a simulation: full blocks by identity, under the server's policy objects, and
the time that reading them takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.eviction import EvictionPolicy
from sglang_hc.tools.simulator.costs import GpuCosts
from sglang_hc.tree.promotions import Promotion


class DiskBlock:
    """One block on disk; what a policy sees of it. ready_at: when its write is through."""

    __slots__ = ("block_id", "children", "parent", "ready_at")

    pins = 0
    num_tokens = BLOCK_TOKENS

    def __init__(self, block_id: bytes, parent: DiskBlock | None, ready_at: float) -> None:
        self.block_id = block_id
        self.parent = parent
        self.ready_at = ready_at
        self.children = 0

    @property
    def is_leaf(self) -> bool:
        return not self.children


class SimulatedDisk:
    """Which blocks are on disk. One whose parent is not there is not taken: it is unreachable."""

    def __init__(self, num_slots: int, policy: EvictionPolicy[DiskBlock]) -> None:
        self.num_slots = num_slots
        self._policy = policy
        self._blocks: dict[bytes, DiskBlock] = {}
        self.written_blocks = self.evicted_blocks = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def readable(self, block_id: bytes, now: float) -> bool:
        block = self._blocks.get(block_id)
        return block is not None and block.ready_at <= now

    def holds(self, block_id: bytes) -> bool:
        return block_id in self._blocks

    def write(self, parent: bytes | None, block_id: bytes, ready_at: float) -> bool:
        """Take a block that is not on disk yet; it can be read from `ready_at` on. False when its
        parent is missing.

        Makes room afterwards, so that the policy can turn the newcomer itself away.
        """
        above = None
        if parent is not None:
            above = self._blocks.get(parent)
            if above is None:
                return False
        block = DiskBlock(block_id, above, ready_at)
        if above is not None:
            above.children += 1
        self._blocks[block_id] = block
        self.written_blocks += 1
        self._policy.insert(block)
        if len(self._blocks) > self.num_slots:
            for victim in self._policy.victims():
                self._take_out(victim)
                self.evicted_blocks += 1
                break
        return True

    def access(self, chain: list[bytes]) -> None:
        """The leading blocks of a path were used, wherever they were read."""
        path = []
        for block_id in chain:
            block = self._blocks.get(block_id)
            if block is None:
                break
            path.append(block)
        self._policy.access(path)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every parent is here and children are counted."""
        children: dict[bytes, int] = {}
        for block in self._blocks.values():
            if block.parent is not None:
                assert self._blocks[block.parent.block_id] is block.parent
                children[block.parent.block_id] = children.get(block.parent.block_id, 0) + 1
        assert all(b.children == children.get(i, 0) for i, b in self._blocks.items())
        assert len(self._blocks) <= self.num_slots
        assert len(self._policy) == len(self._blocks)

    def _take_out(self, block: DiskBlock) -> None:
        del self._blocks[block.block_id]
        if block.parent is not None:
            block.parent.children -= 1
        self._policy.remove(block)


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
