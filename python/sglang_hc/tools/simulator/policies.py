"""Eviction policies by name: the server's, and first in, first out, which papers compare with."""

from __future__ import annotations

from sglang_hc.policy.eviction import (
    B,
    Entry,
    EvictionPolicy,
    Key,
    NextUse,
    QueuePolicy,
    make_policy,
)
from sglang_hc.policy.learned import LEARNED, LearnedPolicy
from sglang_hc.policy.pauses import Pauses


class FifoPolicy(EvictionPolicy[B]):
    """First stored, first out. A path that grows keeps the age of its first block.

    Otherwise every turn would renew a conversation's age at its leaf, and the policy would be LRU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._born: dict[bytes, int] = {}
        self._grown: set[bytes] = set()

    def _entered(self, entry: Entry[B]) -> None:
        born, above = entry.used, entry.block.parent
        if above is not None and above.block_id in self._born:
            if above.block_id not in self._grown:  # the path goes on: the same conversation
                born = self._born[above.block_id]
            self._grown.add(above.block_id)
        self._born[entry.block.block_id] = born

    def remove(self, block: B) -> None:
        super().remove(block)
        del self._born[block.block_id]
        self._grown.discard(block.block_id)

    def _key(self, entry: Entry[B]) -> Key:
        return (self._born[entry.block.block_id], entry.used)


class QueueByAge(QueuePolicy[B]):
    """The server's order on its disk (store/disk/eviction.py): of what nobody needs the oldest
    leaves, whatever was learned of loops."""

    def _preferred_to(self, oldest: Entry[B]) -> Entry[B] | None:
        return None


def policy_named(name: str, window: NextUse, *, disk: bool = False) -> EvictionPolicy[B]:
    """A policy of the server by its name there, "fifo" or "none". disk: for the disk. Raises
    ValueError."""
    if name == "fifo":
        return FifoPolicy()
    if name == "none":  # what the device keeps leaves as in SGLang
        name = "lru"
    if disk and name in ("queue", LEARNED):
        return QueueByAge(window)
    return LearnedPolicy(Pauses(), window) if name == LEARNED else make_policy(name, window)
