"""Blocks that are restored as they come: any order of arrival, copies, failure and pressure."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.meeting import Action
from sglang_hc.queue.requests import Serial
from sglang_hc.restore.prerestored import (
    interleave_slots,
    missing_ranges,
)
from sglang_hc.srt.engine.intake import SERIAL
from sglang_hc.srt.tree.ahead import RestoreAhead
from sglang_hc.srt.tree.device_tree import DeviceTree
from sglang_hc.store.outcome import Outcome
from support.early_world import ME, STOP, EarlyWorld
from support.examples import examples
from support.meeting_world import WORD


@pytest.mark.parametrize(("limit", "blocks"), [(STOP, [10, 11]), (STOP - 1, [10])])
def test_a_block_whose_end_must_be_computed_is_not_restored_early(
    limit: int, blocks: list[int]
) -> None:
    world = EarlyWorld()
    world.meeting.read_down_to(10)
    world.deliver()
    world.deliver()
    assert world.restore(limit) == blocks
    world.settle()


def test_where_it_does_not_pay_nothing_is_restored_early() -> None:
    world = EarlyWorld()
    world.meeting.as_they_come = False
    world.meeting.read_down_to(8)
    world.deliver()
    assert world.restore() == []
    world.settle()


def test_what_is_computed_all_the_same_goes_back() -> None:
    world = EarlyWorld()
    world.meeting.read_down_to(8)
    while world.io.moves:
        world.deliver()
    world.restore()
    world.early.drop_before(ME, 10 * BLOCK_TOKENS)
    assert world.early.tokens == 2 * BLOCK_TOKENS and sorted(world.meeting.load.restored) == [
        10,
        11,
    ]
    world.check_room()
    world.settle()


def test_slots_that_others_need_go_back_and_stay_there() -> None:
    world = EarlyWorld()
    world.meeting.read_down_to(8)
    world.deliver()
    world.restore()
    assert world.early.release() == BLOCK_TOKENS and not world.meeting.load.restored
    world.deliver()
    assert world.restore() == []
    world.settle()


def test_a_block_that_left_its_place_before_it_was_copied_does_not_count() -> None:
    world = EarlyWorld(held=6)
    world.meeting.read_down_to(6)
    while world.io.moves:
        world.deliver()
    assert world.restore() == [6, 7, 8, 9, 10, 11]
    world.others()
    world.early.prove(ME)
    assert world.early.tokens == 0
    world.settle()


def restore_front(world: EarlyWorld, blocks: list[int]) -> None:
    """Blocks that are in host memory are restored while the request waits."""
    nodes = world.host.tree.match(world.prompt).nodes
    slots = world.allocator.alloc(BLOCK_TOKENS * len(blocks))
    world.early.restore(ME, {n: nodes[n] for n in blocks}, slots)
    world.check_room()


@pytest.mark.parametrize("in_tree", [False, True])
def test_what_an_error_left_unwritten_is_handed_to_nobody(in_tree: bool) -> None:
    world = EarlyWorld(held=2)
    world.copies.fail = True
    if in_tree:
        with pytest.raises(OSError, match="planted"):
            restore_front(world, [0, 1])
    world.meeting.read_down_to(2)
    while world.io.moves:
        world.deliver()
    if not in_tree:
        with pytest.raises(OSError, match="planted"):
            world.restore()
    assert world.early.tokens == 0 and world.early.of(ME).restored == []
    world.check_room()
    world.head = 0
    world.early.prove(ME)
    nodes = world.meeting.join(world.head, 0.0)
    assert nodes is not None and world.early.hand_over(ME, nodes, 0, STOP) == {}
    world.settle()


def test_a_request_whose_meeting_is_over_has_its_blocks_once_and_they_count() -> None:
    """It waits on, and what host memory has of its history is looked up again."""
    world = EarlyWorld(held=3)
    world.head = 0
    restore_front(world, [0, 1])
    world.meeting.read_down_to(8)
    world.deliver()
    assert world.restore() == [11]
    world.early.drop_unproven()
    world.meeting.close()
    world.copies.wait()
    assert world.early.of(ME).restored == [0, 1]
    restore_front(world, [0, 1, 2])
    nodes = world.host.tree.match(world.prompt).nodes
    there = world.early.hand_over(ME, nodes, 0, 3 * BLOCK_TOKENS)
    assert sorted(there) == [0, 1, 2]
    world.early.give_back(there)
    world.copies.restored.clear()
    world.settle()


def test_a_block_that_is_read_again_gives_its_slots_back() -> None:
    """It was restored ahead, then host memory lost it, and a meeting brings it."""
    world = EarlyWorld(held=3)
    world.head = 0
    restore_front(world, [0, 1, 2])
    world.meeting.first = 1  # as if the blocks behind the first had left
    assert world.restore() == []
    assert world.early.of(ME).restored == [0] and world.early.tokens == BLOCK_TOKENS
    assert not world.meeting.is_here(BLOCK_TOKENS)
    world.settle()


def restore_what_came(
    world: EarlyWorld, prompt: int, room: Callable[[], int], most: int | None = None
) -> int:
    """As a pass does, for a prompt of so many tokens."""

    class Tree:
        page_size, allocate = 1, staticmethod(world.allocator.alloc)
        room = property(lambda self: room())

    nobody: Any = None
    ahead = RestoreAhead(world.early, nobody, nobody, nobody, nobody)
    req = SimpleNamespace(
        prefix_len=world.head, full_untruncated_fill_ids=range(prompt),
        _compute_max_prefix_len=lambda length: length - 1, **{SERIAL: ME},
    )  # fmt: skip
    tree = cast(DeviceTree, Tree())
    return ahead.restore_what_came(tree, world.meeting, req, world.head, most)


def test_a_pass_restores_no_more_than_it_may_of_what_came() -> None:
    world = EarlyWorld()
    world.meeting.read_down_to(8)
    while world.io.moves:
        world.deliver()
    assert restore_what_came(world, STOP + 20, lambda: 2 * STOP, 3) == 3
    assert sorted(world.early.of(ME).restored) == [8, 9, 10]
    assert restore_what_came(world, STOP + 20, lambda: 2 * STOP, 3) == 1
    world.settle()


def test_who_is_served_first_keeps_what_it_has_where_the_slots_of_others_are_enough() -> None:
    world = EarlyWorld()
    world.meeting.read_down_to(8)
    world.deliver()
    assert world.restore() == [11]
    nodes, other = {0: world.meeting.detached_node(11)}, Serial(2)
    world.early.restore(other, nodes, world.allocator.alloc(BLOCK_TOKENS))
    world.copies.restored.clear()
    world.deliver()
    free = world.allocator.available_size()
    prompt = free + 2 * BLOCK_TOKENS
    assert restore_what_came(world, prompt, world.allocator.available_size) == 1
    assert world.early.tokens_of(other) == 0 and world.meeting.has_room
    assert sorted(world.early.of(ME).restored) == [10, 11]
    world.settle()


@pytest.mark.parametrize(("spare", "restored"), [(0, True), (-1, False)])
def test_the_rest_of_the_prompt_has_room_or_nothing_is_restored_early(
    spare: int, restored: bool
) -> None:
    """What the prompt still needs beside the early blocks is free, or just not."""
    world = EarlyWorld(held=1)
    world.meeting.read_down_to(8)
    world.deliver()
    assert world.restore() == [11]
    world.deliver()
    prompt = STOP + 20
    rest = prompt - world.head - world.early.tokens
    evictable = 100
    others = world.allocator.alloc(len(world.allocator.unused) - (rest - evictable + spare))
    room = world.allocator.available_size() + evictable
    assert restore_what_came(world, prompt, lambda: room) == restored
    assert world.early.tokens == (2 * BLOCK_TOKENS if restored else 0)
    assert world.meeting.has_room == restored
    world.allocator.free(others)
    world.settle()


OUTCOMES = st.sampled_from([Outcome.OK] * 6 + [Outcome.DAMAGED, Outcome.IO_ERROR])


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_whatever_comes_when_what_is_there_is_right_and_no_slot_is_lost(
    data: st.DataObject,
) -> None:
    world = EarlyWorld(
        slots=data.draw(st.integers(len(WORD), 40), "slots"),
        held=data.draw(st.integers(0, 4), "held"),
        share=data.draw(st.floats(0, 1), "share"),
    )
    events: dict[str, Any] = {
        "read": lambda: world.deliver(data.draw(st.integers(0, 11)), data.draw(OUTCOMES)),
        "copy": world.copies.step,
        "others": world.others,
        "weights": lambda: world.io.moves or world.disk.coming.give_up_all(),
        "pressure": world.early.release,
    }
    often = ["read"] * 5 + ["copy"] * 3
    world.meeting.read_down_to(data.draw(st.integers(0, len(WORD) - 1), "low"))
    now = 0.0
    for _ in range(40):
        for _ in range(data.draw(st.integers(0, 5), "events")):
            events[data.draw(st.sampled_from([*often, *events]))]()
        if data.draw(st.integers(0, 19), "abort") == 0:
            break
        now += 0.7
        world.restore()
        step = world.meeting.next(world.head, data.draw(st.integers(0, 1), "decoding"), now)
        if step.action is Action.RESTORE:
            world.meet()
        if step.action in (Action.RESTORE, Action.OVER):
            break
        if step.action is Action.COMPUTE:
            world.early.drop_before(ME, world.head + step.tokens)
            try:
                world.compute(step.tokens, saved=data.draw(st.integers(0, 9)) > 0)
            except AssertionError:
                pass  # no room to save it
    world.settle()


def test_missing_ranges_begin_where_the_head_ends() -> None:
    slots = torch.arange(BLOCK_TOKENS)
    there = {2: slots, 4: slots}
    assert missing_ranges(there, 100, 5 * BLOCK_TOKENS + 1) == [
        (100, 2 * BLOCK_TOKENS), (3 * BLOCK_TOKENS, 4 * BLOCK_TOKENS),
        (5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS + 1),
    ]  # fmt: skip
    others = torch.arange(1000, 1000 + 28 + BLOCK_TOKENS + 1)
    whole = interleave_slots(there, others, 100, 5 * BLOCK_TOKENS + 1)
    assert torch.equal(whole[:28], others[:28]) and torch.equal(
        whole[28 : 28 + BLOCK_TOKENS], slots
    )
    assert len(whole) == 5 * BLOCK_TOKENS + 1 - 100 and whole[-1] == others[-1]
