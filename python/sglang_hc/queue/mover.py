"""What earlier turns stored of a cut prompt moves to its new place in the tree.

A block of a cut prompt that no tier has under its own identity may be there as a block of what the
prompt was cut to before, or of the whole prompt (`tree/cuts.py`). Its bytes are then copied to a
slot of their own and join the cut path, ahead of the request's turn, as a block from disk does:
from host memory by the I/O executor, from disk or the remote store by a read of the other block.

The bytes do not change. The new block knows how far its state has moved, and a restoration rotates
its K (`restore.restore_pass`). Moved blocks are not written to disk again: after a restart, or when
host memory has lost them, they are moved once more from where they were computed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.eviction import IsProtected
from sglang_hc.store.executor import CopySlot
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.scatter_queue import ScatterQueue
from sglang_hc.tree.block_tree import BlockNode, Moved
from sglang_hc.tree.cuts import EarlierPath
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import BlockPath
from sglang_hc.tree.promotions import Promotion, Promotions


class _Source(NamedTuple):
    """Where one block comes from: a block of host memory, or else `block_id` from below.

    moved: as the new block will have it; None for a block that is read back to its own place.
    """

    block_id: bytes
    node: BlockNode | None
    moved: Moved | None


class BlockMover:
    """Brings blocks of cut prompts to host memory, from their own place or from an earlier one.

    Belongs to the scheduler thread and never waits. Counts overflow_moved_tokens in `counters`.
    """

    def __init__(
        self,
        host: HostTier,
        disk: LowerTier | None,
        scatters: ScatterQueue,
        counters: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._disk = disk
        self._scatters = scatters
        self.now = clock
        self.coming = disk.coming if disk is not None else Promotions(host)
        self._counters = counters
        self._copied: set[bytes] = set()

    def find(
        self, path: BlockPath, earlier: Sequence[EarlierPath], first: int
    ) -> Sequence[SourceTier] | None:
        """Where the blocks of a cut path come from that can be brought to host memory, from block
        `first` on without a gap; None when that is not known yet, but soon."""
        sources = self._sources(path, earlier, first, len(path.block_ids))
        if sources is None:
            return None
        return [
            SourceTier.HOST if node is not None else self._tier_of(block_id)
            for block_id, node, _ in sources
        ]

    def fetch(
        self,
        path: BlockPath,
        earlier: Sequence[EarlierPath],
        first: int,
        count: int,
        is_protected: IsProtected[BlockNode] | None,
    ) -> int:
        """Begin to bring blocks [first, first + count) of a path to host memory: as many leading
        ones as find a slot without evicting what `is_protected` protects. Returns how many.

        None of these may be on its way.
        """
        sources = self._sources(path, earlier, first, first + count) or []
        nodes = [source.node for source in sources if source.node is not None]
        self._host.pin(nodes)  # making room must not take what is to be copied
        now = self.now()
        promotions = self.coming.begin(path, first, len(sources), now, is_protected)
        reads: list[Promotion] = []
        block_ids: list[bytes] = []
        for promotion, source in zip(promotions, sources, strict=False):
            promotion.moved = source.moved
            if source.node is not None:
                self._copy(source.node, promotion)
            else:
                reads.append(promotion)
                block_ids.append(source.block_id)
            if source.moved is not None and source.moved.shift:
                self._counters["overflow_moved_tokens"] += BLOCK_TOKENS
        self._host.unpin(nodes)
        if reads:
            assert self._disk is not None
            self._disk.read(reads, block_ids)
        return len(promotions)

    def take_copied(self, block_ids: Iterable[bytes]) -> set[bytes]:
        """Which of these blocks, that have come or have not, were copied from host memory; asked
        once."""
        copied = self._copied.intersection(block_ids)
        self._copied -= copied
        return copied

    def _copy(self, node: BlockNode, promotion: Promotion) -> None:
        """Copy a block's bytes to the slot of a promotion; both are held until they are there."""
        self._host.pin([node])
        self._copied.add(promotion.block_id)
        progress = self._scatters.submit(CopySlot(node.slot, promotion.slot))
        progress.then(partial(self._end_copy, node, promotion))

    def _end_copy(self, node: BlockNode, promotion: Promotion) -> None:
        self._host.unpin([node])
        if promotion.slot in self._host.damaged_slots:
            self._counters["scatter_failed"] += 1
            self.coming.fail(promotion)
        else:
            self.coming.complete([promotion], self.now())

    def _sources(
        self, path: BlockPath, earlier: Sequence[EarlierPath], first: int, stop: int
    ) -> list[_Source] | None:
        """Of blocks [first, stop), up to the first one that is nowhere. None: not known yet."""
        found: list[_Source] = []
        while first + len(found) < stop:
            more = self._run(path, earlier, first + len(found), stop)
            if more is None:
                return None
            if not more:
                break
            found += more
        return found

    def _run(
        self, path: BlockPath, earlier: Sequence[EarlierPath], first: int, stop: int
    ) -> list[_Source] | None:
        """The next blocks that lie one behind the other in one place: their own, else the latest
        earlier path that has any."""
        ids = path.block_ids[first:stop]
        own = self._below(ids)
        if own is None:
            return None
        if own:
            return [_Source(block_id, None, None) for block_id in ids[:own]]
        for way in earlier:
            end = min(stop, way.head) if first < way.head else stop
            run = self._on(way, way.place(first), way.place(end - 1) + 1, way.shift_of(first))
            if run is None or run:
                return run
        return []

    def _on(self, way: EarlierPath, first: int, stop: int, shift: int) -> list[_Source] | None:
        """Leading blocks [first, stop) of an earlier path that host memory or a tier below has."""
        match = self._host.tree.match(way.path.prefix.up_to(stop))
        whole = match.nodes[first : match.tokens // BLOCK_TOKENS]
        ready = list(takewhile(lambda node: node.ready, whole))
        if ready:
            return [_Source(node.block_id, node, _moved(node, shift)) for node in ready]
        if whole:  # its rows are still being scattered
            return None
        known = way.path.block_ids[first:stop]
        count = self._below(known)
        if count is None:
            return None
        return [_Source(block_id, None, Moved(block_id, shift)) for block_id in known[:count]]

    def _tier_of(self, block_id: bytes) -> SourceTier:
        assert self._disk is not None
        return self._disk.sources([block_id])[0]

    def _below(self, block_ids: Sequence[bytes]) -> int | None:
        return 0 if self._disk is None else self._disk.find(block_ids)


def _moved(node: BlockNode, shift: int) -> Moved:
    """What a copy of a block is that lies `shift` tokens nearer to the start."""
    if node.moved is None:
        return Moved(node.block_id, shift)
    return Moved(node.moved.origin, node.moved.shift + shift)
