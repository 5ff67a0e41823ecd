"""Blocks that are read layer by layer: how far they are, whatever comes in whatever order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.policy.meeting import LEAST_GROUPS
from sglang_hc.store.layer_reads import READ_BYTES, LayerReads, layer_groups
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.promotions import Promotion
from support.meeting_world import GROUPS, WORD, World

FAILURES = (Outcome.DAMAGED, Outcome.IO_ERROR, Outcome.TIMED_OUT, Outcome.LOST)


def layout(plan: LayerPlan, row: int) -> BlockLayout:
    return BlockLayout(plan, StateShape(plan.num_layers, row, (row, row), "bfloat16"))


@given(
    st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 40)),
    st.integers(1, 1 << 15),
)
def test_groups_are_all_stored_layers_in_order_and_large_where_that_costs_no_pipeline(
    counts: tuple[int, int, int], row: int
) -> None:
    stored = layout(LayerPlan(*counts), row)
    groups = layer_groups(stored)
    assert tuple(layer for group in groups for layer in group) == stored.stored_layers
    sizes = {len(group) for group in groups[:-1]} or {1}
    assert len(sizes) == 1 and max(map(len, groups)) == len(groups[0])
    if max(sizes) > 1:
        assert len(groups) >= LEAST_GROUPS
        chunk = stored.slot_bytes // len(stored.stored_layers)
        assert (max(sizes) - 1) * chunk < READ_BYTES


def test_a_model_of_many_small_layers_is_read_a_mebibyte_at_a_time() -> None:
    groups = layer_groups(layout(LayerPlan(0, 0, 32), 2048))  # K and V of Llama-3.1-8B
    assert {len(group) for group in groups} == {READ_BYTES // (BLOCK_TOKENS * 4096)}


def blocks(count: int) -> list[Promotion]:
    return [Promotion(bytes([n]), b"", None, slot=n) for n in range(count)]


@given(st.data())
def test_a_layer_is_there_when_all_blocks_have_it(data: st.DataObject) -> None:
    promotions = blocks(data.draw(st.integers(1, 4)))
    reads = LayerReads(promotions, GROUPS)
    pieces = list(reads.pieces())
    assert [group for _, group in pieces] == sorted(group for _, group in pieces)
    left, failed = Counter(pieces), dict[Promotion, Outcome]()
    for promotion, group in data.draw(st.permutations(pieces)):
        outcome = data.draw(st.sampled_from((*[Outcome.OK] * 9, *FAILURES)))
        ended = reads.came(promotion, group, outcome)
        if outcome is Outcome.OK:
            del left[promotion, group]
        else:
            failed.setdefault(promotion, outcome)
        for number, layers in enumerate(GROUPS):
            here = not any((one, number) in left for one in promotions)
            assert all(reads.has(layer) == here for layer in layers)
        assert reads.is_lost == bool(failed)
        if ended is not None:
            assert ended is failed.get(promotion, Outcome.OK)
    with pytest.raises(KeyError):
        reads.has(len(GROUPS) + 5)


@pytest.mark.parametrize("outcome", FAILURES)
@pytest.mark.parametrize("when", range(len(GROUPS)))
def test_a_block_that_is_missing_to_other_reads_is_lost_for_what_was_found(
    outcome: Outcome, when: int
) -> None:
    (block,) = blocks(1)
    reads = LayerReads([block], GROUPS)
    outcomes = [Outcome.MISSING] * len(GROUPS)
    outcomes[when] = outcome
    ended = [reads.came(block, group, each) for group, each in enumerate(outcomes)]
    assert ended == [None, None, outcome]


@given(st.data())
def test_blocks_read_by_layers_end_once_and_leave_no_slot(data: st.DataObject) -> None:
    world = World()
    reads = world.stream(4, len(WORD))
    assert [block for block, _ in world.io.begun_layers[:8]] == [
        promotion.block_id for promotion in reads.promotions
    ], "the first layers of all blocks come first"
    good = {promotion.block_id for promotion in reads.promotions}
    while world.io.moves:
        number = data.draw(st.integers(0, len(world.io.moves) - 1))
        outcome = data.draw(st.sampled_from((*[Outcome.OK] * 20, *FAILURES)))
        move = world.io.moves[number]
        if outcome is not Outcome.OK:
            good.discard(move.block_id)
        world.deliver(number, outcome)
    counts = world.io.counts
    assert sum(n for name, n in counts.items() if name.startswith("disk_read_")) == 8 - len(good)
    assert counts["disk_loaded_blocks"] == len(good)
    assert {p.block_id for p in reads.promotions if reads.has_all(p.slot)} == good
    world.disk.coming.give_up(reads.promotions)
    world.settle()
