"""What happens to nodes and slots of the device tree beside SGLang's own: each slot has one owner
and SGLang's check of its tree finds nothing, whatever comes in between."""

from __future__ import annotations

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from benchmark.hooks.parts import CPU, cache_params, scheduler_with, tiers_of
from sglang_hc.policy.restore_plan import Reason
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.restore.prerestored import PrerestoredBlocks
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.model.weight_versions import WeightVersions
from sglang_hc.srt.ranks.start_group import StartGroup
from sglang_hc.srt.tree.device_eviction import DeviceOrder
from sglang_hc.srt.tree.device_tree import readable
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.host import FINGERPRINT

SLOTS = 4096


class Allocator:
    """Device slots in their order. Giving one back that is free fails."""

    device = CPU

    def __init__(self) -> None:
        self.free_slots = set(range(1, SLOTS + 1))

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > len(self.free_slots):
            return None
        given = sorted(self.free_slots)[:count]
        self.free_slots.difference_update(given)
        return torch.tensor(given, dtype=torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        back = slots.tolist()
        assert len(set(back)) == len(back) and not self.free_slots & set(back)
        self.free_slots |= set(back)

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        self.free(slots)


class World:
    """A tree of this page size. drafts: its keys count pairs of tokens, as with an EAGLE draft."""

    def __init__(self, page: int, drafts: bool) -> None:
        self.slots, self.page, self.lag = Allocator(), page, int(drafts)
        own: Any = self.slots
        params = replace(
            cache_params(), page_size=page, is_eagle=drafts, token_to_kv_pool_allocator=own
        )
        order = DeviceOrder(FINGERPRINT, LookAhead())
        tiers, compute = tiers_of(4), ComputeStream(CPU)
        ahead = PrerestoredBlocks(own, tiers.restorer, compute)
        weights = WeightVersions(StartGroup(0, 1))
        self.tree = HcRadixCache(
            readable(params, order), tiers, scheduler_with(0), compute, ahead, weights
        )
        self.locks: list[Any] = []
        self.waiting: dict[tuple[str | None, bytes], Any] = {}

    def key(self, tokens: list[int], salt: str | None) -> RadixKey:
        return RadixKey(array("q", tokens), salt)

    def keep(self, tokens: list[int], salt: str | None) -> None:
        """What a request has computed goes into the tree."""
        count = max(0, len(tokens) - self.lag) // self.page * self.page
        slots = self.slots.alloc(count)
        assert slots is not None
        if count:
            key = self.key(tokens[: count + self.lag], salt)
            self.tree.insert(InsertParams(key=key, value=slots))

    def extend(self, tokens: list[int], salt: str | None, known: int, other: bool) -> None:
        """Slots for tokens behind the first `known` that the tree has. other: somebody else's come
        in between."""
        found = self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens[:known], salt)))
        start, end = found.device_prefix_len, found.last_device_node
        lock = self.tree.lock(end)
        if other:
            self.keep(tokens, salt)
        count = max(0, len(tokens) - self.lag - start) // self.page * self.page
        slots = self.slots.alloc(count)
        assert slots is not None
        before = self.tree.path_device_indices(end)
        key = self.key(tokens[: start + count + self.lag], salt)
        has = self.tree.has(self.key(tokens[: start + count + self.lag], salt))
        node = self.tree.extend(end, before, key, slots) if count else None
        if count:
            assert (node is None) == (has > start)
        if node is None:
            self.slots.free(slots)
        else:
            path = self.tree.path_device_indices(node).tolist()
            assert path == [*before.tolist(), *slots.tolist()]
        self.tree.unlock(lock)

    def lock(self, tokens: list[int], salt: str | None) -> None:
        found = self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens, salt)))
        self.locks.append(self.tree.lock(found.last_device_node))

    def wait(self, tokens: list[int], salt: str | None) -> None:
        """A request waits, which is matched in every step from now on."""
        req = SimpleNamespace(session=None, rid="r", extra_key=salt)
        self.waiting[salt, pack_tokens(tokens)] = tokens, req

    def look(self) -> None:
        """What waits finds what the tree has."""
        for (salt, _), (tokens, req) in self.waiting.items():
            params = MatchPrefixParams(key=self.key(tokens, salt), req=req)
            found = self.tree.match_prefix(params)
            alone = self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens, salt)))
            assert found.device_prefix_len == self.tree.has(self.key(tokens, salt))
            assert found.last_device_node == alone.last_device_node

    def end(self) -> None:
        """Nobody uses anything any more: every slot is free again."""
        for lock in self.locks:
            self.tree.unlock(lock)
        self.tree.evict(EvictParams(num_tokens=SLOTS))
        self.check()
        assert len(self.slots.free_slots) == SLOTS

    def check(self) -> None:
        self.tree.sanity_check()
        owned = self.tree.all_values_flatten().tolist() if self.tree.total_size()[0] else []
        assert sorted([*owned, *self.slots.free_slots]) == list(range(1, SLOTS + 1))
        sizes = self.tree.evictable_size() + self.tree.protected_size()
        assert sizes == len(owned) == self.tree.full_evictable_size() + self.tree.protected_size()


def stretch(word: list[int], length: int) -> list[int]:
    """Prompts that agree up to their first different letter, of 40 tokens each."""
    return [letter * 7 + place % 5 for letter in word for place in range(40)][:length]


def test_a_restored_piece_has_the_priority_of_its_request() -> None:
    """With `--radix-eviction-policy priority` it would stay longer than its client wanted."""
    world = World(1, drafts=False)
    tokens = stretch([0, 1], 80)
    key, slots = world.key(tokens[:40], None), world.slots.alloc(80)
    assert slots is not None
    world.tree.insert(InsertParams(key=key, value=slots[:40], priority=-5))
    end = world.tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
    node = world.tree.extend(end, slots[:40], world.key(tokens, None), slots[40:], -5)
    assert node is not None
    assert [world.tree.node(one).priority for one in (end, node)] == [-5, -5]


@pytest.mark.parametrize("reason", Reason)
def test_nothing_is_restored_for_whom_it_is_refused(reason: Reason) -> None:
    tree = World(1, drafts=False).tree
    req = SimpleNamespace(cache_request_handle=object(), host_hit_length=64, last_node=0)
    for _ in range(2):
        slots, node = tree.refuse(req, reason)
        assert slots.tolist() == [] and node == 0 and req.host_hit_length == 0


def test_what_is_in_use_of_two_namespaces_of_a_client_stays_apart_when_he_is_forgotten() -> None:
    """The same tokens, as with an adapter and without."""
    world, tokens = World(1, drafts=False), stretch([0], 100)
    for salt in ("a", "b"):
        world.keep(tokens, salt)
        world.lock(tokens, salt)
    world.tree.forget_namespaces({"a", "b"}.__contains__, "hidden")
    world.look()
    world.check()
    world.end()


words = st.lists(st.integers(0, 1), min_size=1, max_size=5)
salts = st.sampled_from([None, "a", "b"])
steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["keep", "extend", "meet", "lock", "unlock", "wait", "evict", "drop", "forget", "leave"]
        ),
        words, st.integers(1, 200), st.integers(0, 200), salts,
    ),
    max_size=25,
)  # fmt: skip


@pytest.mark.parametrize("drafts", [False, True], ids=["tokens", "pairs"])
@pytest.mark.parametrize("page", [1, 16, 64])
@settings(max_examples=40, deadline=None)
@given(steps)
def test_each_slot_has_one_owner(page: int, drafts: bool, script: list[Any]) -> None:
    """leave: a client of two namespaces, in which the same tokens may be in use."""
    world = World(page, drafts)
    for number, (action, word, length, known, salt) in enumerate(script):
        tokens = stretch(word, length)
        if action == "keep":
            world.keep(tokens, salt)
        elif action in ("extend", "meet"):
            world.extend(tokens, salt, known, other=action == "meet")
        elif action == "lock":
            world.lock(tokens, salt)
        elif action == "wait":
            world.wait(tokens, salt)
        elif action == "unlock" and world.locks:
            world.tree.unlock(world.locks.pop())
        elif action == "evict":
            world.tree.evict(EvictParams(num_tokens=length))
        elif action == "drop":
            world.tree.drop_last_block(Prefix(salt, pack_tokens(tokens)))
        elif action in ("forget", "leave"):
            gone = {salt} if action == "forget" else {"a", "b"}
            world.tree.forget_namespaces(gone.__contains__, f"hidden {number}")
            assert all(world.tree.has(world.key(tokens, one)) == 0 for one in gone)
        world.look()
        world.check()
    world.end()
