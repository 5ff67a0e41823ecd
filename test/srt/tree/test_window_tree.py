"""Slots of two pools in SGLang's tree: whatever was inserted and has left, a path grows to its end
and is taken back again, and every slot of both pools has one owner."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_hc.forms import BLOCK_TOKENS, EndLayout, WindowLayers
from sglang_hc.policy.eviction import NextUse
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.srt.tree.device_eviction import DeviceOrder
from sglang_hc.srt.tree.device_tree import readable
from sglang_hc.srt.tree.window_tree import LATE, Grown, WindowTree
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.examples import examples
from support.host import FINGERPRINT

WINDOW = 95
SLOTS, WINDOWS = 1024, 640
RUNNING = 1
"""Requests that run."""


class Tree(WindowTree):
    """The device tree alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.ends = EndLayout(WindowLayers((0,), WINDOW, (4, 4)))


def tree(page: int, needs: NextUse | None = None) -> Tree:
    pool = SWAKVPool(
        SLOTS, WINDOWS, page, torch.float32, 1, 1, [0], [1], "cpu", enable_memory_saver=False
    )
    allocator = SWATokenToKVPoolAllocator(
        SLOTS, WINDOWS, page, torch.float32, "cpu", pool, need_sort=False
    )
    rows = SimpleNamespace(
        req_to_token=torch.zeros((2, SLOTS), dtype=torch.int32), size=8,
        available_size=lambda: 8 - RUNNING,
    )  # fmt: skip
    params = CacheInitParams(
        disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator,
        page_size=page, sliding_window_size=WINDOW,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
    )  # fmt: skip
    return Tree(readable(params, DeviceOrder(FINGERPRINT, needs or LookAhead())))


def key_of(path: int, length: int) -> RadixKey:
    """Paths share their first 150, 200, ... tokens."""
    own = [path * 1000 + place if place >= 150 + 50 * path else place for place in range(length)]
    return RadixKey(array("q", own))


def compute(cache: Tree, key: RadixKey) -> None:
    """A request computes what the device lacks of a prompt, and leaves it there with the windows
    before its end, as SGLang does. Nothing where there is no room."""
    allocator, page = cache.token_to_kv_pool_allocator, cache.page_size
    key = key.page_aligned(page)
    found = cache.match_prefix(MatchPrefixParams(key=key))
    start, count = found.device_prefix_len, len(key) - found.device_prefix_len
    lock = cache.lock(found.last_device_node)
    try:
        room = cache._make_room(count, count)
        taken = cache._take(count, count) if room and count else None
        if taken is None:
            return
        slots, windows = taken
        cache._pair(slots, windows)
        gone = max(start, len(key) - -(-WINDOW // page) * page)
        allocator.free_swa_segment(slots[: gone - start], start_pos=start)
        value = torch.cat([cache.path_device_indices(found.last_device_node)[:start], slots])
        params = InsertParams(key, value, prev_prefix_len=start)
        params.set_evicted_seqlen(ComponentType.SWA, gone)
        cache.insert(params)
    finally:
        cache.unlock(lock)


def grow(cache: Tree, key: RadixKey) -> Grown | None:
    """As for a request that has what the device can go on behind."""
    found = cache.match_prefix(MatchPrefixParams(key=key))
    before = cache.path_device_indices(found.last_device_node)[: found.device_prefix_len]
    lock = cache.lock(found.last_device_node)
    grown = cache.grow(before, key) if found.device_prefix_len < len(key) else None
    cache.unlock(lock)
    return grown


def check(cache: Tree) -> None:
    """Each slot has one owner, and second slots are those of the mapping."""
    allocator, seen, windows = cache.token_to_kv_pool_allocator, [], []
    stack = [cache.node(cache.root_node_handle())]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        if node.parent is None:
            continue
        slots, own = (node.component_data[kind].value for kind in cache.tree_components)
        seen += slots.tolist()
        mapped = allocator.full_to_swa_index_mapping[slots]
        if own is None:
            assert not mapped.any(), "a second slot that no node has"
        else:
            assert torch.equal(mapped, own)
            windows += own.tolist()
    for used, free, size in (
        (seen, allocator.full_available_size(), SLOTS),
        (windows, allocator.swa_available_size(), WINDOWS),
    ):
        assert len(set(used)) == len(used) and len(used) + free == size and 0 not in used
    assert cache.full_evictable_size() == len(seen)
    assert cache.swa_evictable_size() == len(windows)
    assert not cache.protected_size() and not cache.swa_protected_size()
    cache.sanity_check()


steps = st.lists(
    st.tuples(
        st.sampled_from(["compute", "grow", "take back", "windows leave", "leave"]),
        st.integers(0, 2), st.integers(1, 7),
    ),
    max_size=20,
)  # fmt: skip


@pytest.mark.parametrize("page", [1, 64])
@settings(max_examples=examples(20), deadline=None)
@given(history=steps)
def test_paths_grow_and_nothing_is_lost(page: int, history: Any) -> None:
    cache = tree(page)
    for what, path, number in history:
        key = key_of(path, number * BLOCK_TOKENS)
        if what == "compute":
            compute(cache, key_of(path, number * 61))
        elif what == "windows leave":
            cache.evict(EvictParams(num_tokens=0, swa_num_tokens=number * 40))
        elif what == "leave":
            cache.evict(EvictParams(num_tokens=number * 60))
        else:
            before = cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
            grown = grow(cache, key)
            if grown is not None and what == "take back":
                cache.take_back(key, grown)
                found = cache.match_prefix(MatchPrefixParams(key=key))
                assert found.device_prefix_len <= before, "nobody goes on behind rows without bytes"
            elif grown is not None:
                found = cache.match_prefix(MatchPrefixParams(key=key))
                assert found.device_prefix_len == len(key)
                assert cache.has(key) == len(key)
                low = max(0, len(key) - cache.kept)
                assert all(low <= begin < end <= len(key) for begin, end in grown.ranges)
                assert sum(end - begin for begin, end in grown.ranges) == len(grown.windows)
        check(cache)


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("there", [0, 300])
def test_new_slots_stay_while_their_rows_are_on_the_way(page: int, there: int) -> None:
    """A restoration has a lock on the end. Whoever needs slots meanwhile gets others."""
    cache, key = tree(page), key_of(0, 5 * BLOCK_TOKENS)
    if there:  # slots of the path are there, but for the windows behind them
        compute(cache, key_of(0, there))
        compute(cache, key_of(0, there + 100))
        cache.evict(EvictParams(num_tokens=0, swa_num_tokens=WINDOWS))
    grown = grow(cache, key)
    assert grown is not None
    lock = cache.lock(grown.node)
    cache.evict(EvictParams(num_tokens=SLOTS, swa_num_tokens=WINDOWS))
    allocator = cache.token_to_kv_pool_allocator
    left = allocator.swa_attn_allocator.alloc(allocator.swa_available_size())
    assert not set(left.tolist()) & set(grown.windows.tolist())
    allocator.swa_attn_allocator.free(left)
    cache.unlock(lock)
    check(cache)


@pytest.mark.parametrize("page", [1, 64])
def test_nothing_is_held_back_where_windows_run_out(page: int) -> None:
    """SGLang would end the last request that runs, whose own rows are held back. What nobody uses
    can leave, and counts as free."""
    cache, key = tree(page), key_of(0, 5 * BLOCK_TOKENS)
    compute(cache, key)
    lock = cache.lock(cache.match_prefix(MatchPrefixParams(key=key)).last_device_node)
    kv = SimpleNamespace(kv_committed_len=400)
    req = SimpleNamespace(origin_input_ids=[1] * 380, output_ids=[1] * 20, kv=kv)
    whole = 399 // BLOCK_TOKENS * BLOCK_TOKENS - cache.kept
    windows = cache.token_to_kv_pool_allocator.swa_attn_allocator
    windows.alloc(windows.available_size() - 2 * RUNNING * max(page, LATE))
    assert cache.swa_retain_floor(req) == whole
    windows.alloc(page)
    assert cache.swa_retain_floor(req) is None
    cache.unlock(lock)
    assert cache.swa_retain_floor(req) == whole


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize(("lacks", "steps"), [(True, 148), (False, 148), (True, 0)])
def test_rows_of_running_requests_give_way_to_their_own_window(
    page: int, lacks: bool, steps: int
) -> None:
    """Where nothing else can leave, and there is less than the next passes take; never those that
    a pass under way reads."""
    cache, computed = tree(page), 448
    allocator = cache.token_to_kv_pool_allocator
    taken = cache._take(computed, computed)
    assert taken is not None
    cache._pair(*taken)
    cache.req_to_token_pool.req_to_token[1, :computed] = taken[0].to(torch.int32)
    kv = ReqKvInfo(req_pool_idx=1, kv_committed_len=computed, kv_allocated_len=computed)
    req = SimpleNamespace(
        origin_input_ids=[1] * 300,
        output_ids=[1] * (computed - 299),
        kv=kv,
        decode_batch_idx=steps,
    )
    windows = allocator.swa_attn_allocator
    free = 2 * RUNNING * max(page, LATE) - (page if lacks else 0)
    windows.alloc(windows.available_size() - free)
    cache.give_way([req])
    window = -(-max(WINDOW, page) // page) * page
    gone = (computed - window) // page * page if lacks and steps else 0
    mapped = allocator.full_to_swa_index_mapping[taken[0]]
    assert not mapped[:gone].any() and torch.equal(mapped[gone:], taken[1][gone:])


def test_windows_that_somebody_waits_for_leave_last() -> None:
    """And the one of the path that is needed last leaves before the one that is needed first."""
    needed = {0: 2.0, 1: 1.0}

    class Needs(LookAhead):
        def __len__(self) -> int:
            return len(needed)

        def next_use(self, block_id: bytes) -> float | None:
            return uses.get(block_id)

    uses: dict[bytes, float] = {}
    cache = tree(1, Needs())
    keys = [RadixKey(array("q", [path] * 100)) for path in range(3)]
    for key in keys:
        compute(cache, key)
    order = cache.components[ComponentType.FULL]._order
    for path, use in needed.items():
        (node,) = list(cache.path_of(keys[path]))[-1:]
        uses[order._blocks(node).first] = use
    left = []
    for _ in keys:
        cache.evict(EvictParams(num_tokens=0, swa_num_tokens=1))
        left.append([cache.has(key) for key in keys])
    assert left == [[100, 100, 0], [0, 100, 0], [0, 0, 0]]


def nodes_of(cache: Tree) -> dict[int, list[int]]:
    """Of each node of the tree all tokens up to its end."""
    found: dict[int, list[int]] = {}
    for node in cache.nodes():
        found[node.id] = [*found.get(node.parent.id, []), *node.key.token_ids[: len(node.key)]]
    return found


@pytest.mark.parametrize("page", [1, 64])
@settings(max_examples=examples(40), deadline=None)
@given(
    computed=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 420)), min_size=1, max_size=4),
    path=st.integers(0, 2), blocks=st.integers(1, 6),
)  # fmt: skip
def test_a_block_leaves_with_the_nodes_that_have_a_token_of_it(
    page: int, computed: list[tuple[int, int]], path: int, blocks: int
) -> None:
    """And with all below them; inside a node nobody may be able to go on. A block that an audit
    found wrong stayed, where its node goes on behind it."""
    cache = tree(page)
    for number, length in computed:
        compute(cache, key_of(number, length))
    wanted, before = key_of(path, blocks * BLOCK_TOKENS), nodes_of(cache)
    cache.drop_last_block(Prefix(None, pack_tokens(list(wanted.token_ids))))
    for number, tokens in before.items():
        same = wanted.match(RadixKey(array("q", tokens)), page)
        assert (number in nodes_of(cache)) == (same <= (blocks - 1) * BLOCK_TOKENS)
    check(cache)
