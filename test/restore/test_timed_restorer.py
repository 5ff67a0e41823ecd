"""Each restore pass is timed once, with what was decided of it, and its bytes are counted."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.restore_plan import Choice, Reason, RestorePlan
from sglang_hc.restore.path import Restoration
from sglang_hc.restore.timed_restorer import PENDING, Timed, TimedRestorer
from sglang_hc.tree.block_tree import BlockNode
from support.tiers import HIDDEN_BYTES, PARTS, build

PLANS = [LayerPlan(0, 0, 2), LayerPlan(0, 1, 1), LayerPlan(0, 2, 0)]
LENGTHS = st.integers(1, 2 * BLOCK_TOKENS)


class World:
    """Two blocks in the host tier, and a device that they are restored to."""

    def __init__(self, plan: LayerPlan) -> None:
        self.tiers, _, _ = build(plan, slots=2, device_slots=2 * BLOCK_TOKENS)
        assert isinstance(self.tiers.restorer, TimedRestorer)
        self.restorer, self.timed = self.tiers.restorer, list[Timed]()
        self.restorer.on_timed = self.timed.append
        self.nodes: list[BlockNode] = []
        parent = self.tiers.host.tree.root(None)
        for number in range(2):
            slot = self.tiers.host.stage(0.0)
            assert slot is not None
            tokens = bytes([number]) * 4 * BLOCK_TOKENS
            parent = self.tiers.host.publish(parent, tokens, slot, 0.0).node
            parent.ready = True
            self.nodes.append(parent)

    def restoration(self, length: int) -> Restoration:
        nodes = tuple(self.nodes[: -(-length // BLOCK_TOKENS)])
        return Restoration(nodes, 0, length, torch.arange(length))


def decided(tokens: int) -> RestorePlan:
    return RestorePlan(Choice.LOAD, Reason.AS_STORED, tokens, 0)


@given(st.sampled_from(PLANS), st.lists(st.lists(LENGTHS, min_size=1, max_size=3), max_size=4))
def test_passes_are_timed_with_their_own_plans(plan: LayerPlan, passes: list[list[int]]) -> None:
    """A request all of whose blocks were restored before has a plan and no restoration."""
    world, bytes_of = World(plan), 0
    row = plan.hidden * HIDDEN_BYTES + plan.kv * sum(PARTS)
    for lengths in passes:
        for length in lengths:
            world.restorer.queue(world.restoration(length), lambda: None)
            world.restorer.decided(decided(length))
            world.restorer.decided(decided(0))
        world.restorer.run_now()
        bytes_of += row * sum(lengths)
    world.tiers.poll()
    assert [one.tokens for one in world.timed] == [sum(lengths) for lengths in passes]
    told = [[plan.tokens for plan in one.plans] for one in world.timed]
    assert told == passes
    assert all(one.seconds >= 0 for one in world.timed)
    assert world.restorer.restored_bytes == bytes_of


@given(LENGTHS, LENGTHS)
def test_what_is_restored_early_has_no_plan(early: int, later: int) -> None:
    world = World(LayerPlan(0, 1, 1))
    world.restorer.restore_early([world.restoration(early)])
    world.restorer.queue(world.restoration(later), lambda: None)
    world.restorer.decided(decided(later))
    world.restorer.run_now()
    assert [(one.tokens, len(one.plans)) for one in world.timed] == [(early, 0), (later, 1)]


def test_so_many_passes_wait_for_the_device_and_no_more() -> None:
    world = World(LayerPlan(0, 0, 2))
    for _ in range(PENDING + 1):
        world.restorer.restore_early([world.restoration(1)])
    world.tiers.poll()
    assert len(world.timed) == PENDING
    world.restorer.restore_early([world.restoration(1)])
    world.tiers.poll()
    assert len(world.timed) == PENDING + 1
