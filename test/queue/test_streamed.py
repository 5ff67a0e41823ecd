"""Blocks of a meeting that are read last and layer by layer: when the last pass may follow them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.meeting import History, Split
from sglang_hc.queue.fetches import Missing
from sglang_hc.queue.meeting import Action, TailReads
from sglang_hc.queue.meetings import Meetings
from sglang_hc.queue.prefetch import PATIENCE
from sglang_hc.store.outcome import Outcome
from support.examples import examples
from support.meeting_world import LAYERS, WORD, World

LOW, END = 4, 7
"""Blocks [LOW, END) are streamed, those behind them read whole."""

SECONDS = 2.0


def streaming(held: int = 0, share: float = 0.0) -> World:
    world = World(held=held, share=share)
    world.meeting.stream(LOW, END, SECONDS)
    return world


def action(world: World, decoding: int = 0, now: float = 0.0) -> Action | None:
    step = world.meeting.stream_step(world.head, decoding, now)
    return None if step is None else step.action


def test_whole_blocks_are_read_first_then_layer_by_layer() -> None:
    world = streaming()
    assert world.io.begun == list(reversed(world.path.block_ids[END:]))
    names = list(reversed(world.path.block_ids[LOW:END]))
    assert world.io.begun_layers == [(name, (layer,)) for layer in LAYERS for name in names]
    world.settle()


def test_the_pass_begins_when_nothing_but_streamed_blocks_is_missing() -> None:
    world = streaming()
    step = world.meeting.next(0, 0, 0.0)
    assert step == (Action.COMPUTE, LOW * BLOCK_TOKENS), "up to the first streamed block"
    world.compute(step.tokens)
    for left in reversed(range(len(WORD) - END)):
        assert action(world) is Action.WAIT
        world.deliver()
        assert (action(world) is Action.STREAM) == (left == 0)
    reads = world.meeting.take_streamed()
    assert action(world) is None, "it is asked for once"
    while world.io.moves:
        world.deliver()
    assert all(map(reads.has, LAYERS))
    nodes = world.meeting.join(world.head, 0.0)
    assert nodes is not None and [node.block_id for node in nodes] == world.path.block_ids
    world.settle()


def test_a_head_that_reaches_into_the_streamed_blocks_leaves_the_others_to_stream() -> None:
    world = streaming()
    world.compute((LOW + 1) * BLOCK_TOKENS)
    while len(world.io.moves) > len(world.io.begun_layers):
        world.deliver()
    assert action(world) is Action.STREAM
    world.compute((END - LOW - 1) * BLOCK_TOKENS)
    assert action(world) is None, "nothing that is streamed is left"
    world.settle()


@pytest.mark.parametrize("cause", ["decoding", "lost", "lost behind", "late", "here"])
def test_what_ends_streaming_leaves_a_meeting_as_any_other(cause: str) -> None:
    world = streaming()
    world.compute(LOW * BLOCK_TOKENS)
    now = 0.0
    if cause == "lost":
        while len(world.io.moves) > len(world.io.begun_layers):
            world.deliver()
        world.deliver(0, Outcome.DAMAGED)
    elif cause == "lost behind":  # it was waited for as long as the whole request should take
        world.deliver(0, Outcome.DAMAGED)
    elif cause == "late":
        assert action(world) is Action.WAIT
        now = min(PATIENCE, SECONDS)
        assert action(world, now=now - 1e-6) is Action.WAIT
    elif cause == "here":
        while world.io.moves:
            world.deliver()
    assert action(world, decoding=int(cause == "decoding"), now=now) is None
    assert action(world) is None, "and for good"
    world.share = 0.5
    step = world.meeting.next(world.head, 0, now)
    then = {"here": Action.RESTORE, "lost behind": Action.OVER}
    assert step.action is then.get(cause, Action.COMPUTE)
    world.settle()


def test_no_pass_follows_the_reads_of_blocks_that_were_given_up() -> None:
    """The weights changed: the slots have other owners when the pass would restore from them."""
    world = World(held=LOW)
    world.meeting.stream(LOW, len(WORD), SECONDS)
    assert action(world) is Action.STREAM
    world.disk.coming.give_up_all()
    assert action(world) is None
    world.settle()


@pytest.mark.parametrize(("share", "waits"), [(0.3, True), (0.5, False)])
def test_a_device_faster_than_its_costs_say_does_not_wait(share: float, waits: bool) -> None:
    """Of the eight blocks that are coming the costs want two computed now, or four: all that are
    streamed."""
    world = streaming(share=share)
    world.compute(LOW * BLOCK_TOKENS)
    assert (action(world) is Action.WAIT) == waits
    if not waits:
        assert world.meeting.next(world.head, 0, 0.0) == (Action.COMPUTE, 4 * BLOCK_TOKENS)
    world.settle()


def test_without_a_slot_for_what_lies_behind_nothing_is_streamed() -> None:
    world = World(slots=len(WORD) - END - 1)
    world.meeting.stream(LOW, END, SECONDS)
    assert not world.io.begun_layers and action(world) is None
    world.settle()


@settings(max_examples=examples(300))
@given(st.data())
def test_any_order_of_events_ends_with_every_slot_given_back(data: st.DataObject) -> None:
    world, now = streaming(data.draw(st.integers(0, 2)), data.draw(st.floats(0, 1))), 0.0
    for _ in range(200):
        event = data.draw(st.sampled_from(["deliver", "deliver", "fail", "time", "next", "next"]))
        if event in ("deliver", "fail"):
            ended = Outcome.OK if event == "deliver" else Outcome.IO_ERROR
            world.deliver(data.draw(st.integers(0, 3)), ended)
        elif event == "time":
            now += 1.0
        else:
            step = world.meeting.next(world.head, data.draw(st.integers(0, 1)), now)
            if step.action is Action.COMPUTE:
                assert step.tokens > 0 and step.tokens % BLOCK_TOKENS == 0
                world.compute(step.tokens)
            elif step.action is Action.STREAM:
                reads = world.meeting.take_streamed()
                while world.io.moves and not reads.is_lost:
                    world.deliver()
                world.meeting.join(world.head, now)
                break
            elif step.action is not Action.WAIT:
                break
    world.settle()


class Streams(World):
    """Costs that say to stream all that is coming, where that can be read by layers."""

    def split(self, history: History, decoding: int, early_from: int | None) -> Split | None:
        self.asked.append(history)
        coming = sum(span.tokens for span in history.coming)
        return Split(0, SECONDS, 0.0, streamed=coming if history.by_layers else 0)


@pytest.mark.parametrize(
    ("far", "can_stream", "streams"), [(0, True, True), (1, True, False), (0, False, False)]
)
def test_only_what_is_all_on_a_disk_that_reads_layers_is_streamed(
    far: int, can_stream: bool, streams: bool
) -> None:
    world = Streams()
    counters: Counter[str] = Counter()
    meetings: Meetings[str] = Meetings(world.host.tree, world, counters, lambda: 0.0)
    sources = [SourceTier.DISK] * (len(WORD) - far) + [SourceTier.REMOTE] * far
    reads = TailReads(world.read, world.disk.came_last, world.stream if can_stream else None)
    missing = Missing(world.path, 0, sources, 0)
    begun = meetings.begin("a", missing, len(WORD), world.disk.coming, reads)
    assert begun == streams == world.asked[0].by_layers, "nothing is worth computing here"
    assert counters["meetings"] == counters["meetings_streamed"] == int(streams)
    if streams:
        step = meetings.stream_step("a", 0)
        assert step is not None and step.action is Action.STREAM
        assert meetings.stream_step("b", 0) is None
        meetings.end("a")
        assert meetings.stream_step("a", 0) is None
    world.settle()
