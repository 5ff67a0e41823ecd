"""SGLang's tree of what is on the device, with what else happens to its nodes and slots."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.guard import SglangTree
from sglang_hc.tree.identity import Prefix, unpack_tokens


class DeviceTree(SglangTree):
    """Belongs to the scheduler thread."""

    @property
    def stopped(self) -> bool:
        """Nothing is restored or saved any more."""
        return False

    @property
    def room(self) -> int:
        """Device slots that are free or can be evicted from the tree."""
        return int(self.token_to_kv_pool_allocator.available_size() + self.evictable_size_)

    @property
    def free(self) -> int:
        """Device slots that nobody has."""
        return int(self.token_to_kv_pool_allocator.available_size())

    def allocate(self, count: int) -> torch.Tensor | None:
        """(count,) int64 free device slots, for which others may leave; None: there is no room."""
        allocator = self.token_to_kv_pool_allocator
        if allocator.available_size() < count:
            self.evict(EvictParams(num_tokens=count - allocator.available_size()))
        slots = allocator.alloc(count)
        return None if slots is None else slots.to(torch.int64)

    def remove_leaf(self, node: Any) -> None:
        """Take an unlocked leaf out of the tree; its slots are free."""
        self.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
        self._delete_leaf(node)
        self.kv_events.record_remove(node)

    def drop_last_block(self, path: Prefix) -> None:
        """Take out what begins with the last block of a path, but for what is locked."""
        key = RadixKey(array("q", unpack_tokens(path.tokens).tolist()), path.namespace)
        before = (len(key) - 1) // BLOCK_TOKENS * BLOCK_TOKENS // self.page_size * self.page_size
        above = RadixCache.match_prefix(self, MatchPrefixParams(key=key[:before]))
        if above.device_prefix_len < before or len(key) - before < self.page_size:
            return
        child = above.last_device_node.children.get(key[before:].child_key(self.page_size))
        for node in _leaves_first([] if child is None else [child]):
            if node.lock_ref == 0:
                self.remove_leaf(node)

    def forget_namespaces(self, names: Callable[[str | None], bool], hidden: str) -> int:
        """Of the namespaces that are named, take out what no request uses, and give the rest the
        namespace `hidden`. Returns the tokens that were there."""
        count = 0
        children = self.root_node.children.values()
        for node in _leaves_first([top for top in children if names(fields.namespace_of(top.key))]):
            count += len(node.key)
            if node.lock_ref == 0:
                self.remove_leaf(node)
                continue
            siblings, old = node.parent.children, node.key
            del siblings[old.child_key(self.page_size)]
            node.key = RadixKey(old.token_ids, hidden, old.is_bigram, old.limit)
            siblings[node.key.child_key(self.page_size)] = node
        return count


def _leaves_first(tops: list[Any]) -> list[Any]:
    """These nodes with all below them, each behind those below it."""
    nodes = list(tops)
    for node in nodes:  # which grows meanwhile
        nodes += node.children.values()
    return nodes[::-1]
