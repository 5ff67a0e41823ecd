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

from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.eviction import IsProtected
from sglang_hc.tree.block_tree import BlockNode, Moved
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import BlockPath


@dataclass(eq=False, slots=True)
class Promotion:
    """One block on its way. parent: the block of the tree that it continues, pinned meanwhile.
    waits_for: the identity of a parent that is not in the tree yet. Neither: the parent is the
    namespace's root. `moved`, `source`: see `BlockNode`.

    asked: when it began. is_tail: by `begin_tail`. done: nobody writes the slot any more: the bytes
    have come, or will not. lost: the block cannot join the tree any more."""

    block_id: bytes
    tokens: bytes
    namespace: str | None
    slot: int
    asked: float
    is_tail: bool = False
    parent: BlockNode | None = None
    waits_for: bytes | None = None
    done: bool = False
    lost: bool = False
    moved: Moved | None = None
    source: SourceTier = SourceTier.HOST

    @property
    def is_good(self) -> bool:
        """The bytes are in the slot, and the block has joined the tree or still may."""
        return self.done and not self.lost


class Promotions:
    """Not thread-safe: belongs to whoever owns the host tier."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._coming: dict[bytes, Promotion] = {}
        self._below: dict[bytes, list[Promotion]] = {}
        """Those that wait for a parent, by its identity."""
        self._on_published: list[Callable[[Sequence[bytes]], object]] = []
        self._on_lost: list[Callable[[bytes], object]] = []

    def __len__(self) -> int:
        return len(self._coming)

    @property
    def block_ids(self) -> KeysView[bytes]:
        """Identities of the blocks on their way, as they are at any time."""
        return self._coming.keys()

    def holds(self, promotion: Promotion) -> bool:
        """Whether the bytes are in the promotion's slot, and the slot is still the promotion's."""
        return promotion.is_good and self._coming.get(promotion.block_id) is promotion

    def subscribe(
        self,
        on_published: Callable[[Sequence[bytes]], object],
        on_lost: Callable[[bytes], object],
    ) -> None:
        """Each block that began is named once, by its identity: to `on_published`, together with
        the others that joined the tree in the same call, or to `on_lost`."""
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
        parent = None
        if first:
            above = self._coming.get(path.block_ids[first - 1])
            if above is None:
                match = self._host.tree.match(path.prefix.up_to(first))
                if match.tokens < first * BLOCK_TOKENS:
                    return []
                parent = match.nodes[-1]
                self._host.pin((parent,))  # making room must not take the path that is extended
            elif above.lost:
                return []
        promotions: list[Promotion] = []
        for index in range(first, first + count):
            slot = self._host.stage(now, is_protected)
            if slot is None:
                break
            promotion = self._coming_to(slot, path, index, now)
            if parent is not None:
                promotion.parent, parent = parent, None
            elif index:
                self._wait(promotion, path.block_ids[index - 1])
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
        without evicting what `is_protected` protects, and down to one that is on its way for
        somebody else. They need no parent yet."""
        promotions: list[Promotion] = []
        for index in reversed(range(low, high)):
            if path.block_ids[index] in self._coming:
                break
            slot = self._host.stage(now, is_protected)
            if slot is None:
                break
            promotion = self._coming_to(slot, path, index, now)
            promotion.is_tail = True
            before = path.block_ids[index - 1] if index else self._root_of(promotion).block_id
            self._wait(promotion, before)
            promotions.append(promotion)
        return promotions

    def join(self, parent: BlockNode, now: float) -> None:
        """What waits for this block of the tree, or root, continues it from now on."""
        published: list[bytes] = []
        for promotion in self._adopted(parent):
            published += self._publish(promotion, now)
        self._announce(published)

    def give_up(self, promotions: Iterable[Promotion]) -> None:
        """Those of these that still wait for their parent will not join the tree."""
        for promotion in promotions:
            if promotion.waits_for is not None and not promotion.lost:
                self._lose(promotion)

    def give_up_all(self) -> None:
        """As `give_up`, of all that are on their way."""
        self.give_up(list(self._coming.values()))

    def forget(self, names: Callable[[str | None], bool]) -> None:
        """Blocks of namespaces that `names` is true for will not join the tree."""
        for promotion in list(self._coming.values()):
            if names(promotion.namespace) and not promotion.lost:
                self._lose(promotion)

    def complete(self, promotions: Sequence[Promotion], now: float) -> None:
        """The bytes of these are in their slots."""
        published: list[bytes] = []
        for promotion in promotions:
            promotion.done = True
            if promotion.lost:
                self._free(promotion)
            elif promotion.waits_for is None:
                published += self._publish(promotion, now)
        self._announce(published)

    def fail(self, promotion: Promotion) -> None:
        """The bytes will not come, and nobody writes the slot any more."""
        promotion.done = True
        if promotion.lost:
            self._free(promotion)
        else:
            self._lose(promotion)

    def _coming_to(self, slot: int, path: BlockPath, index: int, now: float) -> Promotion:
        """A block of a path is on its way to a slot from now on."""
        prefix, block_id = path.prefix, path.block_ids[index]
        promotion = Promotion(block_id, prefix.block(index), prefix.namespace, slot, now)
        self._coming[block_id] = promotion
        return promotion

    def _wait(self, promotion: Promotion, before: bytes) -> None:
        promotion.waits_for = before
        self._below.setdefault(before, []).append(promotion)

    def _root_of(self, promotion: Promotion) -> BlockNode:
        return self._host.tree.root(promotion.namespace)

    def _publish(self, promotion: Promotion, now: float) -> list[bytes]:
        """A block whose parent is in the tree joins it, and those below it that are here too.
        Returns their identities."""
        host, ready, published = self._host, [promotion], []
        while ready:
            item = ready.pop()
            parent = item.parent or self._root_of(item)
            if parent.parent is None and not parent.is_root:  # dropped in spite of its pin
                self._lose(item)
                continue
            node, created, _ = host.publish(parent, item.tokens, item.slot, now, item.block_id)
            if created:
                node.moved, node.source, node.below = item.moved, item.source, True
                host.mark_ready(node)
            else:
                host.unstage(item.slot)
            ready += self._adopted(node)
            self._end(item)
            published.append(item.block_id)
        return published

    def _announce(self, published: list[bytes]) -> None:
        if published:
            for listener in self._on_published:
                listener(published)

    def _adopted(self, parent: BlockNode) -> list[Promotion]:
        """Gives those that wait for `parent` their place below it. Returns those that have come."""
        children = self._below.pop(parent.block_id, ())
        for child in children:
            child.waits_for = None
            if not parent.is_root:
                child.parent = parent
                self._host.pin((parent,))
        return [child for child in children if child.done]

    def _lose(self, promotion: Promotion) -> None:
        """Neither this block nor those below it can join the tree, except tails: whoever began them
        may bring what they continue."""
        if promotion.waits_for is not None:
            self._forget(promotion.waits_for, [promotion])
        lost = [promotion]
        for item in lost:  # which grows meanwhile
            item.lost = True
            below = [p for p in self._below.get(item.block_id, ()) if not p.is_tail]
            self._forget(item.block_id, below)
            lost += below
            if item.done:
                self._free(item)

    def _forget(self, parent: bytes, lost: Sequence[Promotion]) -> None:
        """These do not wait for this parent any more."""
        left = [promotion for promotion in self._below.pop(parent, ()) if promotion not in lost]
        if left:
            self._below[parent] = left

    def _free(self, promotion: Promotion) -> None:
        self._host.unstage(promotion.slot)
        self._end(promotion)
        for listener in self._on_lost:
            listener(promotion.block_id)

    def _end(self, promotion: Promotion) -> None:
        del self._coming[promotion.block_id]
        if promotion.parent is not None:
            self._host.unpin((promotion.parent,))
