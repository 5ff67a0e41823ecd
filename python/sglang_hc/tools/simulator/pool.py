"""The KV pool of a simulated device, which running requests and idle state share."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tools.simulator.jobs import Job
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.host_tier import HostTier


class KvPool:
    """Rows of running requests are counted, not placed: of the free slots of the `idle` state so
    many are `held`. A request holds room for its prompt and its answer from its admission on, so
    none is ever retracted."""

    def __init__(self, idle: HostTier) -> None:
        self.idle = idle
        self.held = 0
        self._running: dict[int, tuple[int, Sequence[BlockNode]]] = {}
        self._ahead: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return self.idle.free_slots - self.held

    def admit(self, job: Job, found: Sequence[BlockNode], now: float) -> bool:
        """Make room for a request that finds these blocks on the device. False where there is none
        until others end. What was restored for others in the queue makes room last."""
        tokens = job.prompt_tokens + job.output_tokens
        need = -(-tokens // BLOCK_TOKENS) - len(found)
        lacks = need - self._ahead.get(job.number, 0)
        self.idle.pin(found)
        self.idle.evict(lacks - self.free, now)
        if lacks > self.free and not self._running:
            self.held -= sum(self._ahead.values())
            self._ahead.clear()
            lacks = need
        if lacks > self.free:
            self.idle.unpin(found)
            return False
        self.held += lacks
        self._ahead.pop(job.number, None)
        self._running[job.number] = need, found
        return True

    def hold_ahead(self, number: int, blocks: int) -> bool:
        """Room for blocks that are restored for a waiting request, if it is free."""
        if blocks > self.free:
            return False
        self.held += blocks
        self._ahead[number] = self._ahead.get(number, 0) + blocks
        return True

    def ahead(self, number: int) -> int:
        """Blocks that a waiting request has here."""
        return self._ahead.get(number, 0)

    def release(self, number: int) -> None:
        """A running request is through: its rows are free."""
        need, found = self._running.pop(number)
        self.held -= need
        self.idle.unpin(found)
