"""Slots of the host tier: one owner each, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.examples import examples
from support.host import host_tier, keep


class TierMachine(RuleBasedStateMachine):
    SLOTS = 6

    def __init__(self) -> None:
        super().__init__()
        self.tier = host_tier(self.SLOTS)
        self.staged: list[int] = []
        self.pinned: list[BlockNode] = []
        self.now = 0.0

    def some_block(self, which: int) -> BlockNode | None:
        nodes = sorted(self.tier.tree.nodes(), key=lambda node: node.slot)
        return nodes[which % len(nodes)] if nodes else None

    @rule()
    def stage(self) -> None:
        slot = self.tier.stage(self.now)
        if slot is None:
            assert self.tier.free_slots == 0
            assert all(node.pins or not node.is_leaf for node in self.tier.tree.nodes()), (
                "a block could have been evicted"
            )
        else:
            assert slot not in self.staged
            self.staged.append(slot)

    @precondition(lambda self: self.staged)
    @rule(which=st.integers(0, 9))
    def unstage(self, which: int) -> None:
        self.tier.unstage(self.staged.pop(which % len(self.staged)))

    @precondition(lambda self: self.staged)
    @rule(
        name=st.sampled_from([None, "", "a"]),
        which=st.integers(0, 9),
        token=st.integers(0, 1),
        length=st.sampled_from([1, 2, BLOCK_TOKENS]),
        deep=st.booleans(),
    )
    def publish(self, name: str | None, which: int, token: int, length: int, deep: bool) -> None:
        parents = [node for node in self.tier.tree.nodes() if node.is_full and deep]
        parents.sort(key=lambda node: node.slot)
        parent = parents[which % len(parents)] if parents else self.tier.tree.root(name)
        self.now += 1
        slot = self.staged[0]
        if self.tier.publish(parent, pack_tokens([token] * length), slot, self.now).created:
            self.staged.remove(slot)

    @rule(which=st.integers(0, 9))
    def pin(self, which: int) -> None:
        node = self.some_block(which)
        if node is not None:
            self.tier.pin([node])
            self.pinned.append(node)

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 9))
    def unpin(self, which: int) -> None:
        self.tier.unpin([self.pinned.pop(which % len(self.pinned))])

    @rule(which=st.integers(0, 9))
    def drop_branch(self, which: int) -> None:
        node = self.some_block(which)
        if node is not None:
            self.tier.drop_branch(node)

    @rule(which=st.integers(0, 9))
    def use(self, which: int) -> None:
        node = self.some_block(which)
        if node is not None:
            self.now += 1
            self.tier.access(node.path(), self.now)

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        before = self.tier.free_slots
        freed = self.tier.evict(count, self.now)
        assert self.tier.free_slots - before == freed <= count

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        assert self.tier.published_blocks == 0

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        self.tier.check_integrity()
        assert self.tier.staged_slots == len(self.staged)

    @invariant()
    def pinned_slots_are_not_handed_out(self) -> None:
        held = {node.slot for node in self.pinned}
        assert -1 not in held and not held & set(self.staged)

    def teardown(self) -> None:
        self.tier.unpin(self.pinned)
        for slot in self.staged:
            self.tier.unstage(slot)
        self.tier.clear()
        self.tier.check_integrity()
        assert self.tier.free_slots == self.SLOTS


TierMachine.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None, derandomize=True
)
TestTier = TierMachine.TestCase


def test_a_block_that_left_while_in_use_keeps_its_slot_until_the_last_user_goes() -> None:
    tier = host_tier(1)
    keep(tier, pack_tokens([1]))
    (node,) = tier.tree.nodes()
    tier.pin([node, node])
    tier.clear()
    assert tier.tree.match(Prefix(None, pack_tokens([1]))).tokens == 0
    for free in (0, 1):
        assert tier.free_slots == 0
        tier.unpin([node])
        assert tier.free_slots == free
    with pytest.raises(RuntimeError, match="not pinned"):
        tier.unpin([node])


def test_a_tier_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        host_tier(0)


def test_a_lost_slot_is_noticed() -> None:
    tier = host_tier(3)
    keep(tier, pack_tokens([1]))
    next(tier.tree.nodes()).slot = 0 if next(tier.tree.nodes()).slot else 1
    with pytest.raises(AssertionError, match="no owner or two"):
        tier.check_integrity()


def test_a_branch_of_any_length_is_dropped() -> None:
    tier = host_tier(1500)
    path = keep(tier, pack_tokens([1] * (1400 * BLOCK_TOKENS)))
    beside = keep(tier, pack_tokens([1] * BLOCK_TOKENS + [2] * BLOCK_TOKENS))
    tier.drop_branch(path[1])
    assert [*tier.tree.nodes()] in ([path[0], *beside], [*beside, path[0]])
    assert tier.free_slots == 1500 - 2
    tier.check_integrity()
