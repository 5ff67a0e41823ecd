"""Blocks that are read layer by layer, so that a forward pass can follow the reads.

A block's chunks are read in the order of the layers, a few layers at a time, and those of all
blocks before the next layers. Each chunk is proven like that of a whole block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_hc.policy.meeting import layers_per_read
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.promotions import Promotion


def layer_groups(stored: tuple[int, ...], block_seconds: float) -> list[tuple[int, ...]]:
    """Which of the stored layers are read together, in their order. block_seconds: to read one
    block of many; 0 when that is not known."""
    size = layers_per_read(len(stored), block_seconds)
    return [stored[start : start + size] for start in range(0, len(stored), size)]


class LayerReads:
    """How far the reads of some blocks are. Belongs to the scheduler thread."""

    def __init__(self, promotions: Sequence[Promotion], groups: Sequence[tuple[int, ...]]) -> None:
        """groups: see `layer_groups`."""
        self.promotions = tuple(promotions)
        self.groups = tuple(groups)
        self._group_of = {layer: number for number, group in enumerate(groups) for layer in group}
        self._missing = [len(promotions)] * len(groups)
        self._unanswered = dict.fromkeys(promotions, len(groups))
        self._failures: dict[Promotion, Outcome] = {}

    @property
    def is_lost(self) -> bool:
        """Something of these blocks will not come."""
        return bool(self._failures) or any(promotion.lost for promotion in self.promotions)

    def has(self, layer: int) -> bool:
        """Whether this layer of all blocks is in host memory. Raises KeyError for a layer that is
        not stored."""
        return not self._missing[self._group_of[layer]]

    def has_all(self, slot: int) -> bool:
        """Whether all of the block in this host slot is there, by these reads or by others."""
        return all(p.is_good for p in self.promotions if p.slot == slot)

    def pieces(self) -> Iterator[tuple[Promotion, int]]:
        """The reads in their order: each a block and the number of a group."""
        for number in range(len(self.groups)):
            for promotion in self.promotions:
                yield promotion, number

    def came(self, promotion: Promotion, group: int, outcome: Outcome) -> Outcome | None:
        """A read is over. Returns what became of the block when this was its last one: the first
        failure, if there was any. Where a read has found the block damaged, those after it, and
        those beside it, find it missing: that is not why it is lost."""
        self._unanswered[promotion] -= 1
        if outcome is Outcome.OK:
            self._missing[group] -= 1
        elif self._failures.get(promotion, Outcome.MISSING) is Outcome.MISSING:
            self._failures[promotion] = outcome
        if self._unanswered[promotion]:
            return None
        return self._failures.get(promotion, Outcome.OK)
