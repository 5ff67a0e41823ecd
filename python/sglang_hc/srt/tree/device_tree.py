"""SGLang's tree of what is on the device, with what else happens to its nodes and slots.

Outside SGLang's core a node of it is a number. This file, `device_eviction.py`, `window_tree.py`
and `host_match.py` look at the node itself.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.components.base import get_and_increase_time_counter

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.guard import SglangMethod, SglangTree
from sglang_hc.srt.tree.device_eviction import DeviceOrder
from sglang_hc.tree.forgetting import hidden_namespace
from sglang_hc.tree.identity import Prefix, unpack_tokens

MATCHED = "hc_matched"
"""Attribute of a request: what its last match found."""


def readable(params: Any, order: DeviceOrder | None) -> Any:
    """Parameters of a tree of SGLang's whose nodes can be read and leave in this order; None for
    SGLang's own."""
    override = None if order is None else order.components()
    return replace(params, tree_core_backend="python", component_registry_override=override)


def unified_tree(ctx: Any, order: DeviceOrder | None, tree: Callable[[Any], Any]) -> Any:
    """What SGLang's factory builds for a model, but `readable` and without a HiCache of SGLang's.
    ctx: the factory's. tree: makes it of the parameters it gives."""
    params = readable(ctx.params, order)
    own = replace(ctx, params=params, enable_hierarchical_cache=False)
    return create_unified_radix_cache(own, cache_class=tree)


class DeviceTree(SglangTree):
    """Belongs to the scheduler thread."""

    @property
    def stopped(self) -> bool:
        """Nothing is restored or saved any more."""
        return False

    @property
    def has_other_state(self) -> bool:
        """Whether nodes hold more than the slots of their tokens: what layers without full
        attention need behind them. A path can be continued where a node has all of it."""
        return len(self.tree_components) > 1

    @property
    def room(self) -> int:
        """Device slots that are free or can be evicted from the tree."""
        return self.free + int(self.tree_core.evictable_size())

    @property
    def free(self) -> int:
        """Device slots that nobody has."""
        return int(self.token_to_kv_pool_allocator.available_size())

    def node(self, number: int) -> Any:
        """The node of this number. Raises KeyError when it has left the tree."""
        return self.tree_core.node_by_id(number)

    def has(self, key: RadixKey) -> int:
        """How many of the first positions of a key are on the device and can be continued there,
        or a node less. Touches nothing."""
        if not self.has_other_state:
            return int(self.tree_core.match_full_device_prefix(key)[0])
        found = passed = 0
        valid = [one.create_match_validator(match_device_only=True) for one in self.nodes_hold]
        for node in self.path_of(key):
            passed += len(node.key)
            if all([is_valid(node) for is_valid in valid]):  # each counts the nodes of the path
                found = passed
        return found

    @property
    def nodes_hold(self) -> tuple[Any, ...]:
        """SGLang's components of the tree."""
        return tuple(self.components.values())

    def nodes(self) -> Iterator[Any]:
        """All nodes but the root, each before those below it."""
        nodes = [self.node(self.root_node_handle())]
        for node in nodes:  # which grows meanwhile
            yield from node.children.values()
            nodes += node.children.values()

    def positions_of(self, key: RadixKey) -> RadixKey:
        """What the tree can have of a key of tokens: whole pages of positions, of which there is
        one less with a draft model of the EAGLE family."""
        key, _ = key.maybe_to_bigram_view(self.tree_core.is_eagle)
        return key.page_aligned(self.page_size)

    def path_of(self, key: RadixKey) -> Iterator[Any]:
        """The whole nodes of a key's path on the device."""
        key, node = self.positions_of(key), self.node(self.root_node_handle())
        while len(key):
            node = node.children.get(key.child_key(self.page_size))
            if node is None or node.evicted or node.key.match(key, self.page_size) < len(node.key):
                return
            yield node
            key = key[len(node.key) :]

    def match(self, theirs: SglangMethod, params: MatchPrefixParams) -> MatchResult:
        """What SGLang's `theirs` finds. A request that waits is matched in many passes; where it
        would find what it found before, the tree is not walked again."""
        req = params.req
        if self.has_other_state:
            return theirs(
                params
            )  # a node that is there may have lost what else is needed behind it
        known: MatchResult | None = getattr(req, MATCHED, None)
        if known is not None and self._would_find(known, params.key):
            self.node(known.last_device_node).last_access_time = get_and_increase_time_counter()
            return known
        result: MatchResult = theirs(params)
        if req is not None:
            setattr(req, MATCHED, result)
        return result

    def _would_find(self, known: MatchResult, key: RadixKey) -> bool:
        """A node that is there has its path, and its end never moves. So a key that led to it leads
        to it again, unless the path goes on by now."""
        key, _ = key.maybe_to_bigram_view(self.tree_core.is_eagle)
        start, page = known.device_prefix_len, self.page_size
        try:
            node = self.node(known.last_device_node)
        except KeyError:
            return False
        if start > len(key) or (
            start and fields.namespace_of(node.key) != fields.namespace_of(key)
        ):
            return False
        return len(key) < start + page or key.child_key_at(start, page) not in node.children

    def allocate(self, count: int) -> torch.Tensor | None:
        """(count,) int64 free device slots, for which others may leave; None: there is no room."""
        if not count:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        if self.free < count:
            self.evict(EvictParams(num_tokens=count - self.free))
        slots = self.token_to_kv_pool_allocator.alloc(count)
        return None if slots is None else slots.to(torch.int64)

    def extend(
        self, end: int, before: torch.Tensor, key: RadixKey, slots: torch.Tensor, priority: int = 0
    ) -> int | None:
        """A new node that has `slots` for what `key` has behind the node `end`, whose path has the
        slots `before`. (n,) int64 each, together the key's length. priority: of whose it is.

        None when the tree has changed since: the path goes on behind `end` by now, or has left.
        """
        start = len(before)
        if self.tree_core.match_full_device_prefix(key) != (start, end, start):
            return None
        value = torch.cat([before, slots])
        # Neither the slots of the path nor its uses are counted again.
        params = InsertParams(key, value, prev_prefix_len=start, inserted_len=start)
        params.priority = priority
        return int(self.insert(params).last_device_node)

    def remove(self, number: int) -> None:
        """Take an unlocked leaf out of the tree; its slots are free."""
        self._evict_device_leaf(number, Counter())

    def drop_last_block(self, path: Prefix) -> None:
        """Take out what begins with the last block of a path, but for what is locked."""
        key = RadixKey(array("q", unpack_tokens(path.tokens).tolist()), path.namespace)
        before = (len(key) - 1) // BLOCK_TOKENS * BLOCK_TOKENS // self.page_size * self.page_size
        if self.has_other_state:  # inside a node nobody may be able to go on
            self._drop_from(key, before)
            return
        above = SglangTree.match_prefix(self, MatchPrefixParams(key=key[:before]))
        if above.device_prefix_len < before or len(key) - before < self.page_size:
            return
        children = self.node(above.last_device_node).children
        child = children.get(key[before:].child_key(self.page_size))
        for node in _leaves_first([] if child is None else [child]):
            if not _is_locked(node):
                self.remove(node.id)

    def _drop_from(self, key: RadixKey, before: int) -> None:
        """Take out the node of a path that has the token behind `before`, with all below it, but
        for what is locked. The path may end inside that node."""
        key, above, passed = self.positions_of(key), self.node(self.root_node_handle()), 0
        for node in self.path_of(key):
            if passed + len(node.key) > before:
                break
            above, passed = node, passed + len(node.key)
        rest = key[passed:]
        top = above.children.get(rest.child_key(self.page_size)) if len(rest) else None
        if top is None or passed + top.key.match(rest, self.page_size) <= before:
            return
        for node in _leaves_first([top]):
            if not _is_locked(node):
                self.remove(node.id)

    def forget_namespaces(self, names: Callable[[str | None], bool], hidden: str) -> int:
        """Of the namespaces that are named, take out what no request uses, and call the rest
        `hidden_namespace`. Returns the tokens that were there."""
        count = 0
        children = self.node(self.root_node_handle()).children.values()
        for node in _leaves_first([top for top in children if names(fields.namespace_of(top.key))]):
            count += len(node.key)
            if not _is_locked(node):
                self.remove(node.id)
                continue
            self.tree_core.kv_events.record_remove(node)
            siblings, old = node.parent.children, node.key
            del siblings[old.child_key(self.page_size)]
            name = hidden_namespace(hidden, fields.namespace_of(old))
            node.key = RadixKey(old.token_ids, name, old.is_bigram, old.limit)
            siblings[node.key.child_key(self.page_size)] = node
        return count


def _is_locked(node: Any) -> bool:
    return any(data.lock_ref for data in node.component_data)


def _leaves_first(tops: list[Any]) -> list[Any]:
    """These nodes with all below them, each behind those below it."""
    nodes = list(tops)
    for node in nodes:  # which grows meanwhile
        nodes += node.children.values()
    return nodes[::-1]
