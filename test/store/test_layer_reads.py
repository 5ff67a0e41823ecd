"""Blocks that are read layer by layer: how far they are, whatever comes in whatever order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.policy.meeting import LEAST_GROUPS, READ_SECONDS
from sglang_hc.store.layer_reads import LayerReads, layer_groups
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.promotions import Promotion
from support.meeting_world import WORD, World

FAILURES = (Outcome.DAMAGED, Outcome.IO_ERROR, Outcome.TIMED_OUT)


GROUPS = ((0, 1), (2, 3), (4,))
"""Layers that are read together."""


@given(st.integers(0, 3), st.integers(1, 80), st.floats(0.0, 0.1))
def test_groups_are_all_stored_layers_in_order_and_reads_are_long_where_that_costs_no_pipeline(
    first: int, count: int, block_seconds: float
) -> None:
    stored = tuple(range(first, first + count))
    groups = layer_groups(stored, block_seconds)
    assert tuple(layer for group in groups for layer in group) == stored
    size, layer_seconds = len(groups[0]), block_seconds / count
    assert {len(group) for group in groups[:-1]} <= {size} and len(groups[-1]) <= size
    if size > 1:
        assert len(groups) >= LEAST_GROUPS
        assert (size - 1) * layer_seconds < READ_SECONDS * (1 + 1e-9)
    if count // (size + 1) >= LEAST_GROUPS:
        assert size * layer_seconds >= READ_SECONDS * (1 - 1e-9), "longer reads were possible"


@pytest.mark.parametrize(
    ("count", "layer_seconds", "size"),
    [(32, 0.0, 5), (32, 1e-9, 5), (32, 0.7e-4, 3), (32, 1.9e-4, 2), (32, 2.1e-4, 1),
     (12, 0.0, 2), (11, 0.0, 1), (3, 0.0, 1)],
)  # fmt: skip
def test_a_slow_source_is_read_a_layer_at_a_time(
    count: int, layer_seconds: float, size: int
) -> None:
    groups = layer_groups(tuple(range(count)), count * layer_seconds)
    assert len(groups[0]) == size


def blocks(count: int) -> list[Promotion]:
    return [Promotion(bytes([n]), b"", None, slot=n, asked=0.0) for n in range(count)]


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
