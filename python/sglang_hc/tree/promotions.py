"""Blocks on their way into the host tier: which slot each one gets, and when it joins the tree.

    begin -> staged slots -> came (in any order) -> published, parents first
                          `-> failed             -> its slot and those of the blocks below are free

A block's parent in the tree stays pinned until the block has joined it: what is on its way must not
lose its place. Metadata only: whoever calls moves the bytes, and says when they are in place. A
slot is given back only after its own `complete` or `fail`, because somebody may write it until
then.

The end of a history may be read before its beginning is in the tree (`begin_tail`). Such blocks
keep their slots and wait until `join` names the block that they continue, or they are given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.eviction import IsProtected
from sglang_hc.tree.block_tree import BlockNode, Moved
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import BlockPath


@dataclass(eq=False, slots=True)
class Promotion:
    """One block on its way. `above`: its parent if that is on its way too, else `parent` is in the
    tree (None: the namespace's root). waits_for: the identity of a parent that is neither yet.
    `moved`: see `BlockNode`.

    here: the bytes have come, or will not. lost: the block cannot join the tree any more."""

    block_id: bytes
    tokens: bytes
    namespace: str | None
    slot: int
    above: Promotion | None = None
    parent: BlockNode | None = None
    below: list[Promotion] = field(default_factory=list)
    waits_for: bytes | None = None
    here: bool = False
    lost: bool = False
    moved: Moved | None = None

    @property
    def is_good(self) -> bool:
        """The bytes are in the slot, and the block has joined the tree or still may."""
        return self.here and not self.lost


class Promotions:
    """Not thread-safe: belongs to whoever owns the host tier."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._coming: dict[bytes, Promotion] = {}
        self._orphans: dict[bytes, list[Promotion]] = {}
        """Those that wait for a parent, by its identity."""
        self._on_published: list[Callable[[bytes], object]] = []
        self._on_lost: list[Callable[[bytes], object]] = []

    def __len__(self) -> int:
        return len(self._coming)

    def __contains__(self, block_id: bytes) -> bool:
        return block_id in self._coming

    def holds(self, promotion: Promotion) -> bool:
        """Whether the bytes are in the promotion's slot, and the slot is still the promotion's."""
        return promotion.is_good and self._coming.get(promotion.block_id) is promotion

    def subscribe(
        self, on_published: Callable[[bytes], object], on_lost: Callable[[bytes], object]
    ) -> None:
        """Call one of these with the identity of every block that began, once, when it has joined
        the tree or will not."""
        self._on_published.append(on_published)
        self._on_lost.append(on_lost)

    def begin(
        self,
        path: BlockPath,
        first: int,
        count: int,
        now: float,
        is_protected: IsProtected[BlockNode] | None = None,
    ) -> list[Promotion]:
        """Slots for blocks [first, first + count) of a path: for as many leading ones as find room
        without evicting what `is_protected` protects.

        None of these may be on its way. Empty when the block before them is neither in the tree nor
        on its way to it.
        """
        above = parent = None
        if first:
            above = self._coming.get(path.block_ids[first - 1])
            if above is not None and above.lost:
                return []
            if above is None:
                match = self._host.tree.match(path.prefix.up_to(first))
                if match.tokens < first * BLOCK_TOKENS:
                    return []
                parent = match.nodes[-1]
        promotions: list[Promotion] = []
        if parent is not None:
            self._host.pin((parent,))  # making room must not take the path that is extended
        for index in range(first, first + count):
            slot = self._host.stage(now, is_protected)
            if slot is None:
                break
            promotion = self._coming_to(slot, path, index)
            promotion.above, promotion.parent = above, parent
            if above is not None:
                above.below.append(promotion)
            above, parent = promotion, None
            promotions.append(promotion)
        if parent is not None:
            self._host.unpin((parent,))
        return promotions

    def begin_tail(
        self,
        path: BlockPath,
        low: int,
        high: int,
        now: float,
        is_protected: IsProtected[BlockNode] | None = None,
    ) -> list[Promotion]:
        """Slots for blocks [low, high) of a path, the last one first: for as many as find room
        without evicting what `is_protected` protects. They need no parent yet.

        None of these may be on its way.
        """
        promotions: list[Promotion] = []
        for index in reversed(range(low, high)):
            slot = self._host.stage(now, is_protected)
            if slot is None:
                break
            promotion = self._coming_to(slot, path, index)
            before = path.block_ids[index - 1] if index else self._root_of(promotion).block_id
            promotion.waits_for = before
            self._orphans.setdefault(before, []).append(promotion)
            promotions.append(promotion)
        return promotions

    def join(self, parent: BlockNode, now: float) -> None:
        """What waits for this block of the tree, or root, continues it from now on."""
        tips: dict[BlockNode, None] = {}
        for promotion in self._adopted(parent):
            self._publish(promotion, tips, now)
        for tip in tips:
            self._host.access(tip.path(), now)

    def give_up(self, promotions: Iterable[Promotion]) -> None:
        """Those of these that still wait for their parent will not join the tree."""
        for promotion in promotions:
            if promotion.waits_for is not None and not promotion.lost:
                self._lose(promotion)

    def give_up_all(self) -> None:
        """As `give_up`, of all that are on their way."""
        self.give_up(list(self._coming.values()))

    def complete(self, promotions: Sequence[Promotion], now: float) -> None:
        """The bytes of these are in their slots."""
        tips: dict[BlockNode, None] = {}
        for promotion in promotions:
            promotion.here = True
            if promotion.lost:
                self._free(promotion)
            elif promotion.above is None and promotion.waits_for is None:
                self._publish(promotion, tips, now)
        for tip in tips:
            self._host.access(tip.path(), now)

    def fail(self, promotion: Promotion) -> None:
        """The bytes will not come, and nobody writes the slot any more."""
        promotion.here = True
        if promotion.lost:
            self._free(promotion)
        else:
            self._lose(promotion)

    def _coming_to(self, slot: int, path: BlockPath, index: int) -> Promotion:
        """A block of a path is on its way to a slot from now on."""
        prefix = path.prefix
        promotion = Promotion(path.block_ids[index], prefix.block(index), prefix.namespace, slot)
        self._coming[promotion.block_id] = promotion
        return promotion

    def _root_of(self, promotion: Promotion) -> BlockNode:
        return self._host.tree.root(promotion.namespace)

    def _publish(self, promotion: Promotion, tips: dict[BlockNode, None], now: float) -> None:
        """A block whose parent is in the tree joins it, and those below it that are here too."""
        ready = [promotion]
        while ready:
            item = ready.pop()
            parent = item.parent or self._root_of(item)
            if parent.parent is None and not parent.is_root:  # dropped in spite of its pin
                self._lose(item)
                continue
            outcome = self._host.publish(parent, item.tokens, item.slot, now)
            node = outcome.node
            if outcome.created:
                node.moved = item.moved
                self._host.mark_ready(node)
                tips.pop(parent, None)
                tips[node] = None
            else:
                self._host.unstage(item.slot)
            for child in item.below:
                child.above, child.parent = None, node
                self._host.pin((node,))
                if child.here:
                    ready.append(child)
            if self._orphans:
                ready += self._adopted(node)
            self._end(item)
            for listener in self._on_published:
                listener(item.block_id)

    def _adopted(self, parent: BlockNode) -> list[Promotion]:
        """Gives those that wait for `parent` their place below it. Returns those that are here."""
        children = self._orphans.pop(parent.block_id, [])
        for child in children:
            child.waits_for = None
            if not parent.is_root:
                child.parent = parent
                self._host.pin((parent,))
        return [child for child in children if child.here]

    def _lose(self, promotion: Promotion) -> None:
        """Neither this block nor those below it can join the tree."""
        if promotion.above is not None:
            promotion.above.below.remove(promotion)
        if promotion.waits_for is not None:
            waiting = self._orphans[promotion.waits_for]
            waiting.remove(promotion)
            if not waiting:
                del self._orphans[promotion.waits_for]
        lost = [promotion]
        while lost:
            item = lost.pop()
            item.lost = True
            lost += item.below
            item.below.clear()
            if item.here:
                self._free(item)

    def _free(self, promotion: Promotion) -> None:
        self._host.unstage(promotion.slot)
        self._end(promotion)
        for listener in self._on_lost:
            listener(promotion.block_id)

    def _end(self, promotion: Promotion) -> None:
        del self._coming[promotion.block_id]
        if promotion.parent is not None:
            self._host.unpin((promotion.parent,))
