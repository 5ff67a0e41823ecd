"""The records of what is in motion for a request."""

from __future__ import annotations

import pytest

from sglang_hc.queue.loads import BlockLoad
from support.meeting_world import WORD, World

LAST = len(WORD) - 1


def load(world: World) -> BlockLoad:
    return world.meeting.load.blocks[LAST]


def restore(world: World, *, proven: bool) -> None:
    node = world.meeting.detached_node(LAST)
    load(world).write_to("rows", node, proven=proven)


def test_a_block_on_its_way_to_the_device_passes_all_states() -> None:
    world = World()
    assert LAST not in world.meeting.load.blocks, "not asked for"
    world.meeting.read_down_to(LAST)
    assert not load(world).is_here and not load(world).is_lost
    world.deliver()
    assert load(world).is_here and not world.meeting.load.restored
    restore(world, proven=False)
    assert load(world).is_here and world.meeting.load.restored == [LAST]
    load(world).proven = True
    assert load(world).is_here
    assert load(world).take_rows() == "rows"
    assert load(world).is_here and not load(world).proven and not world.meeting.load.restored
    world.settle()


@pytest.mark.parametrize("proven", [False, True])
def test_a_block_that_is_given_up_is_lost_unless_its_copy_was_proven(proven: bool) -> None:
    world = World()
    world.meeting.read_down_to(LAST)
    world.deliver()
    restore(world, proven=proven)
    world.disk.coming.give_up_all()
    assert load(world).is_here is proven and load(world).is_lost is not proven
    world.settle()


def test_a_block_of_host_memory_is_here() -> None:
    assert BlockLoad().is_here and not BlockLoad().is_lost
