"""Which leaves of the device tree leave first (AttentionStore section 3.3.2, on the device).

    needed by a waiting request       last; the one needed last goes first
    pinned for its session            before those
    the rest                          SGLang's order, least recently used first

With nobody waiting and no pins this is SGLang's own order. Nothing here compares times of different
clocks, so all ranks of a group decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent

from sglang_hc.policy.eviction import NextUse
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.guard import answer_of
from sglang_hc.tree.identity import BLOCK_BYTES, block_id, block_ids, pack_tokens, root_id

NOTE = "hc_blocks"
"""Attribute of a device node that holds its `NodeBlocks`."""


class NodeBlocks(NamedTuple):
    """Blocks that end in a device node of `length` tokens; the node's own end counts as one.

    first: identity of the first of them. chain: of the last whole block of the path. rest: packed
    tokens of the path behind it.
    """

    length: int
    first: bytes
    chain: bytes
    rest: bytes


class DeviceOrder:
    """Which leaf of a device tree is needed, and when. Belongs to the scheduler thread.

    needs: ranks of waiting requests, infinity for a pin.
    """

    def __init__(self, fingerprint: bytes, needs: NextUse) -> None:
        self._fingerprint = fingerprint
        self._needs = needs

    def components(self) -> dict[ComponentType, Any]:
        """What SGLang's tree is told to build in place of its own components."""
        return {
            ComponentType.FULL: partial(OrderedLeaves, self),
            ComponentType.SWA: partial(OrderedWindows, self),
        }

    def next_use(self, node: Any) -> float | None:
        """None: nobody waits for it, or for its image, whose ids are none of a block."""
        if not len(self._needs):
            return None
        try:
            return self._needs.next_use(self._blocks(node).first)
        except OverflowError:
            return None

    def sorted(self, nodes: Iterable[Any], cache: Any) -> Iterator[Any]:
        """Nodes in the order in which they should leave, as SGLang has them where nobody waits.
        cache: the tree."""
        needed: list[tuple[float, Any]] = []
        for node in nodes:
            use = answer_of("device_order", cache, partial(self.next_use, node))
            if use is None:
                yield node
            else:
                heappush(needed, (-use, node))
        while needed:
            yield heappop(needed)[1]

    def _blocks(self, node: Any) -> NodeBlocks:
        """The node's blocks, noted on it and on its ancestors; a note ends when a node is split."""
        missing = []
        known = _noted(node)
        while known is None and node.parent is not None:
            missing.append(node)
            node = node.parent
            known = _noted(node)
        if known is None:  # the root of all namespaces
            root = root_id(self._fingerprint, fields.namespace_of(missing[-1].key))
            known = NodeBlocks(0, root, root, b"")
        for below in reversed(missing):
            known = self._extend(known, below)
            setattr(below, NOTE, known)
        return known

    def _extend(self, above: NodeBlocks, node: Any) -> NodeBlocks:
        tokens = above.rest + pack_tokens(node.key.token_ids[: len(node.key)])
        whole = block_ids(self._fingerprint, above.chain, tokens)
        chain = whole[-1] if whole else above.chain
        rest = tokens[len(whole) * BLOCK_BYTES :]
        first = whole[0] if whole else block_id(self._fingerprint, chain, rest)
        return NodeBlocks(len(node.key), first, chain, rest)


class OrderedLeaves(FullComponent):
    """SGLang's part of the tree for full attention, whose leaves leave in a `DeviceOrder`.

    Only leaves that come up are looked at, so a walk costs what SGLang's own does, plus the leaves
    passed over.
    """

    def __init__(self, order: DeviceOrder, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        self._order = order
        self._wanted = 0
        self._walk: Iterator[Any] = iter(())

    def _evict_device_start(self, request_cnt: int) -> None:
        self._wanted, self._walk = request_cnt, self._leaves()

    def _evict_device_next_node(self, tracker: Any, *_: Any, **__: Any) -> int | None:
        if tracker[ComponentType.FULL] >= self._wanted:
            return None
        leaf = next(self._walk, None)
        return None if leaf is None else leaf.id

    def _evict_device_end(self) -> None:
        self._walk = iter(())

    def _leaves(self) -> Iterator[Any]:
        """Unlocked leaves in the order they should leave. Each has left before the next is asked
        for; the parent that it uncovers is in the running too."""
        evictable = self.tree_core.evictable_device_leaves
        heap: list[tuple[float, Any]] = [(leaf.last_access_time, leaf) for leaf in evictable]
        heapify(heap)
        needed: list[tuple[float, Any]] = []
        while heap or needed:
            if heap:
                _, leaf = heappop(heap)
                use = answer_of("device_order", self.cache, partial(self._order.next_use, leaf))
                if use is not None:
                    heappush(needed, (-use, leaf))
                    continue
            else:
                _, leaf = heappop(needed)
            yield leaf
            if leaf.parent in evictable:
                heappush(heap, (leaf.parent.last_access_time, leaf.parent))


class OrderedWindows(SWAComponent):
    """SGLang's part of the tree for sliding windows, which leave in a `DeviceOrder`: a window from
    the middle of a path alone, the one at its end with its leaf.

    A walk costs the windows that could leave, of which each path has one or two.
    """

    def __init__(self, order: DeviceOrder, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        self._order = order
        self._walk: Iterator[Any] = iter(())

    def _evict_device_start(self, request_cnt: int) -> None:
        super()._evict_device_start(request_cnt)
        windows = self.tree_core.lru_lists[self.component_type]
        nodes, node = [], windows.get_lru_no_lock()
        while node is not None:
            nodes.append(node)
            node = windows.get_prev_no_lock(node)
        self._walk = self._order.sorted(nodes, self.cache)

    def _evict_device_next_node(self, *args: Any, **kwargs: Any) -> Any:
        left = self.tree_core.lru_lists[self.component_type].in_list
        self._evict_device_cursor = next(filter(left, self._walk), None)
        return super()._evict_device_next_node(*args, **kwargs)

    def _evict_device_end(self) -> None:
        super()._evict_device_end()
        self._walk = iter(())


def _noted(node: Any) -> NodeBlocks | None:
    note: NodeBlocks | None = getattr(node, NOTE, None)
    return note if note is not None and note.length == len(node.key) else None
