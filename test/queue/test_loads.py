"""The records of what is in motion for a request."""

from __future__ import annotations

import pytest

from sglang_hc.queue.loads import BlockLoad, BlockState
from support.meeting_world import WORD, World

LAST = len(WORD) - 1


def state(world: World, block: int = LAST) -> BlockState | None:
    found = world.meeting.load.blocks.get(block)
    return None if found is None else found.state


def restore(world: World, *, proven: bool) -> None:
    node = world.meeting.detached_node(LAST)
    world.meeting.load.blocks[LAST].write_to("rows", node, proven=proven)


def test_a_block_on_its_way_to_the_device_passes_all_states() -> None:
    world = World()
    assert state(world) is None, "wanted, and not asked for"
    world.meeting.read_down_to(LAST)
    assert state(world) is BlockState.READING
    world.deliver()
    assert state(world) is BlockState.HERE
    restore(world, proven=False)
    assert state(world) is BlockState.RESTORING and world.meeting.load.restored == [LAST]
    world.meeting.load.blocks[LAST].proven = True
    assert state(world) is BlockState.RESTORED
    assert world.meeting.load.blocks[LAST].take_rows() == "rows"
    assert state(world) is BlockState.HERE and not world.meeting.load.restored
    world.settle()


@pytest.mark.parametrize(("proven", "after"), [(False, "LOST"), (True, "RESTORED")])
def test_a_block_that_is_given_up_is_lost_unless_its_copy_was_proven(
    proven: bool, after: str
) -> None:
    world = World()
    world.meeting.read_down_to(LAST)
    world.deliver()
    restore(world, proven=proven)
    world.disk.coming.give_up_all()
    assert state(world) is BlockState[after]
    world.settle()


def test_a_block_of_host_memory_is_here() -> None:
    assert BlockLoad().state is BlockState.HERE
