"""Which leaves of the device tree leave first (AttentionStore section 3.3.2, on the device).

    needed by a waiting request       last; the one needed last goes first
    pinned for its session            before those
    the rest                          SGLang's order, least recently used first

With nobody waiting and no pins this is SGLang's own order. Nothing here compares times of different
clocks, so all ranks of a group decide alike.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from sglang_hc.policy.eviction import NextUse
from sglang_hc.srt.binding import fields
from sglang_hc.srt.tree.device_tree import DeviceTree
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
    """Order of leaves for `HcRadixCache.evict`. Belongs to the scheduler thread.

    needs: ranks of waiting requests, infinity for a pin.
    """

    def __init__(self, fingerprint: bytes, needs: NextUse) -> None:
        self._fingerprint = fingerprint
        self._needs = needs

    def evict(self, tree: DeviceTree, tokens: int) -> int:
        """Take leaves out of the device tree until so many slots are free, as far as there are
        unlocked ones. Returns how many."""
        started, freed, victims = time.perf_counter(), 0, self.victims(tree.evictable_leaves)
        while freed < tokens and (node := next(victims, None)) is not None:
            freed += len(node.value)
            tree.remove_leaf(node)
        tree.update_eviction_metrics(freed, started)
        return freed

    def victims(self, leaves: Collection[Any]) -> Iterator[Any]:
        """Unlocked leaves in the order they should leave.

        The caller takes each one out of the tree before it asks for the next; the parent it
        uncovers is then in the running too. Only those that come up are looked at, so a call costs
        what SGLang's own does, plus the leaves passed over.
        """
        heap: list[tuple[float, Any]] = [(leaf.last_access_time, leaf) for leaf in leaves]
        heapify(heap)
        needed: list[tuple[float, Any]] = []
        some_needed = len(self._needs) > 0
        while heap or needed:
            if heap:
                _, node = heappop(heap)
                use = self._needs.next_use(self._blocks(node).first) if some_needed else None
                if use is not None:
                    heappush(needed, (-use, node))
                    continue
            else:
                _, node = heappop(needed)
            parent = node.parent
            yield node
            if not parent.children and parent.lock_ref == 0:
                heappush(heap, (parent.last_access_time, parent))

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
        tokens = above.rest + pack_tokens(node.key.raw_token_ids())
        whole = block_ids(self._fingerprint, above.chain, tokens)
        chain = whole[-1] if whole else above.chain
        rest = tokens[len(whole) * BLOCK_BYTES :]
        first = whole[0] if whole else block_id(self._fingerprint, chain, rest)
        return NodeBlocks(len(node.key), first, chain, rest)


def _noted(node: Any) -> NodeBlocks | None:
    note: NodeBlocks | None = getattr(node, NOTE, None)
    return note if note is not None and note.length == len(node.key) else None
