"""What leaves the device: SGLang's order when no request waits, the queue's order otherwise."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from benchmark.hooks.parts import cache_over, stock_cache
from sglang_hc.forms import LayerPlan
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.srt.engine import guard
from sglang_hc.srt.tree.device_eviction import DeviceOrder
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from sglang_hc.tree.identity import pack_tokens
from support.host import FINGERPRINT, identities
from support.tiers import build


class Allocator:
    """Takes slots back."""

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        self.freed += slots.tolist()


def ours() -> tuple[HcRadixCache, LookAhead]:
    window = LookAhead()
    tiers, _, _ = build(LayerPlan(0, 0, 1), slots=2, device_slots=4)
    cache = cache_over(tiers, DeviceOrder(FINGERPRINT, window))
    cache.token_to_kv_pool_allocator = Allocator()
    return cache, window


def insert(
    cache: UnifiedRadixCache, tokens: list[int], salt: str | None = None, at: int = 0
) -> None:
    key = RadixKey(array("q", tokens), salt)
    cache.insert(InsertParams(key=key, value=torch.arange(at, at + len(tokens))))


def held(cache: HcRadixCache, tokens: list[int], salt: str | None = None) -> int:
    """Leading tokens the device has."""
    return cache.has(RadixKey(array("q", tokens), salt))


def needs(tokens: list[int], salt: str | None = None) -> list[bytes]:
    return identities(pack_tokens(tokens), salt)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5)
steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "match", "lock", "unlock", "evict"]), prompts,
        st.sampled_from([None, "a"]), st.integers(1, 120),
    ),
    max_size=40,
)  # fmt: skip


def stretch(short: list[int], cut: int) -> list[int]:
    """Token prefixes that share whole blocks, parts of blocks, and nothing."""
    return [token * 7 + place % 5 for token in short for place in range(40)][: cut * 2]


@settings(max_examples=60, deadline=None)
@given(steps)
def test_with_nobody_waiting_it_is_sglangs_own_order(history: Any) -> None:
    cache, _ = ours()
    stock = stock_cache()
    stock.token_to_kv_pool_allocator = Allocator()
    locked: list[list[Any]] = []
    for number, (action, short, salt, count) in enumerate(history):
        tokens = stretch(short, count)
        key = RadixKey(array("q", tokens), salt)
        if action == "insert":
            for tree in (stock, cache):
                insert(tree, tokens, salt, number * 1000)
        elif action == "unlock" and locked:
            for tree, lock in zip((stock, cache), locked.pop(), strict=True):
                tree.unlock(lock)
        elif action == "evict":
            results = [tree.evict(EvictParams(num_tokens=count)) for tree in (stock, cache)]
            assert results[0] == results[1]
        else:
            found = [tree.match_prefix(MatchPrefixParams(key=key)) for tree in (stock, cache)]
            slots = [
                tree.path_device_indices(one.last_device_node)
                for tree, one in zip((stock, cache), found, strict=True)
            ]
            assert slots[0].tolist() == slots[1].tolist()
            if action == "lock":
                pairs = zip((stock, cache), found, strict=True)
                locked.append([tree.lock(one.last_device_node) for tree, one in pairs])
        allocators = [tree.token_to_kv_pool_allocator for tree in (stock, cache)]
        assert allocators[0].freed == allocators[1].freed, "another leaf left, or in another order"
        assert stock.evictable_size() == cache.evictable_size()


@settings(max_examples=60, deadline=None)
@given(steps, prompts)
def test_whatever_is_needed_evict_frees_what_it_can(history: Any, needed: list[int]) -> None:
    cache, window = ours()
    window.update(["r"], 9, lambda _: needs(stretch(needed, 100)))
    for number, (action, short, salt, count) in enumerate(history):
        if action == "evict":
            free = cache.evictable_size()
            freed = cache.evict(EvictParams(num_tokens=count)).num_tokens_evicted
            assert freed >= min(count, free)
            assert cache.evictable_size() == free - freed
        else:
            insert(cache, stretch(short, count), salt, number * 1000)


def turn(number: int, length: int = 130) -> list[int]:
    return [number * 1000 + place for place in range(length)]


def test_what_a_waiting_request_needs_leaves_last_and_what_is_needed_last_leaves_first() -> None:
    cache, window = ours()
    for number in range(5):
        insert(cache, turn(number))
    queue = {"head": turn(0), "tail": turn(1)}
    window.update(list(queue), 9, lambda rid: needs([*queue[rid], 1, 2, 3]))
    left = []
    for _ in range(5):
        cache.evict(EvictParams(num_tokens=130))
        left.append([number for number in range(5) if held(cache, turn(number))])
    assert left == [[0, 1, 3, 4], [0, 1, 4], [0, 1], [0], []]


def test_a_split_node_is_judged_by_its_own_blocks() -> None:
    """The shared system prompt is needed, what another conversation said after it is not."""
    cache, window = ours()
    system, other = turn(0, 256), turn(9, 256)
    insert(cache, [*system, *turn(1)])
    insert(cache, other)
    cache.evict(EvictParams(num_tokens=0))
    window.update(["r"], 9, lambda _: needs([*system, *turn(2)]))
    cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", [*system, *turn(2)]))))
    cache.evict(EvictParams(num_tokens=300))
    assert held(cache, [*system, *turn(1)]) == len(system)
    assert held(cache, other) == 0


@pytest.mark.parametrize("salt", [None, "a"])
def test_needs_of_another_namespace_protect_nothing(salt: str | None) -> None:
    cache, window = ours()
    for number, namespace in enumerate(("a", None)):
        insert(cache, turn(0), namespace, number * 1000)
    window.update(["r"], 9, lambda _: needs(turn(0), salt))
    cache.evict(EvictParams(num_tokens=130))
    assert (held(cache, turn(0), "a") > 0) == (salt == "a")
    assert (held(cache, turn(0)) > 0) == (salt is None)


def test_with_a_draft_model_a_pair_counts_as_its_first_token() -> None:
    """Nodes share the token between them then."""
    cache, window = ours()
    cache.tree_core.is_eagle = True
    system, other = turn(0, 100), turn(9, 300)
    insert(cache, [*system, 1])
    insert(cache, [*system, *turn(1)])
    insert(cache, other)
    window.update(["r"], 9, lambda _: needs([*system, *turn(1)]))
    cache.evict(EvictParams(num_tokens=100))
    assert held(cache, [*system, *turn(1)]) == len([*system, *turn(1)]) - 1
    assert held(cache, other) == 0


def test_an_error_of_ours_leaves_sglangs_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks, which must decide alike, it passes through."""
    cache, window = ours()
    for number in range(3):
        insert(cache, turn(number))
    window.update(["r"], 9, lambda _: needs(turn(0)))
    monkeypatch.setattr(DeviceOrder, "_blocks", lambda *_: {}["planted"])
    before = guard.counters["guarded_errors"]
    cache.evict(EvictParams(num_tokens=130))
    assert guard.counters["guarded_errors"] > before
    assert [number for number in range(3) if held(cache, turn(number))] == [1, 2]
    cache.decides_alone = False
    with pytest.raises(KeyError, match="planted"):
        cache.evict(EvictParams(num_tokens=130))


def test_images_leave_while_somebody_waits() -> None:
    """SGLang gives them ids of 62 bits. Each look at one was an error of ours, which ranks that
    decide together do not survive."""
    cache, window = ours()
    image = [*turn(1), 1 << 61, 5]
    insert(cache, turn(0))
    insert(cache, image)
    window.update(["r"], 9, lambda _: needs(turn(0)))
    before = guard.counters["guarded_errors"]
    cache.evict(EvictParams(num_tokens=132))
    assert (held(cache, image), held(cache, turn(0))) == (0, 130)
    assert guard.counters["guarded_errors"] == before
