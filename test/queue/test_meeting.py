"""The meeting of a computed front and a read end: any order of arrival, failure and progress."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.meeting import History, Split, best_split
from sglang_hc.queue.meeting import LEAST_TOKENS, Action
from sglang_hc.queue.prefetch import PATIENCE
from sglang_hc.store.lower_tier import READ_DEADLINE_S
from sglang_hc.store.outcome import Outcome
from support.examples import examples
from support.meeting_world import BLOCK_SECONDS, WORD, World
from support.profiles import cost_model


def test_the_end_is_read_from_the_last_block_down() -> None:
    world = World()
    assert world.meeting.read_down_to(8) == 4
    assert world.io.begun == list(reversed(world.path.block_ids[8:]))
    assert world.meeting.read_down_to(9) == 0, "these were asked for"
    world.settle()


def test_a_block_of_a_slow_source_is_late_only_behind_those_before_it() -> None:
    """All are asked for at once, and may come in half the speed that the costs say."""
    world = World()
    world.meeting.read_down_to(8)
    late = [move.deadline - READ_DEADLINE_S for move in world.io.moves]
    assert late == [2 * BLOCK_SECONDS * number for number in (1, 2, 3, 4)]
    world.settle()


def test_a_lost_block_moves_the_meeting_behind_it() -> None:
    world = World(share=0.0)
    world.meeting.read_down_to(6)
    damaged = world.path.block_ids[9]
    for _ in range(5):
        bad = world.io.moves[0].block_id == damaged
        world.deliver(0, Outcome.DAMAGED if bad else Outcome.OK)
    step = world.meeting.next(world.head, 0, 0.0)
    assert step == (Action.COMPUTE, 10 * BLOCK_TOKENS)
    world.compute(step.tokens)
    assert world.meeting.next(world.head, 0, 0.0).action is Action.RESTORE
    world.settle()


def test_a_source_that_stands_still_costs_a_wait_and_a_few_passes() -> None:
    world = World(share=0.0)
    world.meeting.read_down_to(1)
    chunks = []
    assert world.meeting.next(world.head, 0, 0.0).action is Action.WAIT
    while (step := world.meeting.next(world.head, 0, PATIENCE)).action is Action.COMPUTE:
        chunks.append(step.tokens)
        world.compute(step.tokens)
    assert step.action is Action.OVER
    assert chunks == [LEAST_TOKENS, 2 * LEAST_TOKENS, 4 * LEAST_TOKENS]
    world.settle()


def test_chunks_that_the_scheduler_cuts_short_are_not_lengthened() -> None:
    """They doubled with every chunk, however short it was, so that little was left to restore."""
    world = World(share=0.2)
    world.meeting.read_down_to(1)
    for _ in range(8):
        assert world.meeting.next(world.head, 0, 0.0).action is Action.COMPUTE
        world.compute(20)
    assert world.head < 3 * LEAST_TOKENS
    world.settle()


def test_nobody_waits_for_what_finds_no_room() -> None:
    world = World(slots=6, share=0.0)
    world.meeting.read_down_to(8)
    assert world.meeting.next(world.head, 1, 0.0).action is Action.COMPUTE
    assert len(world.io.begun) == 6, "the rest was asked for"
    world.settle()


def test_waiting_does_not_lengthen_the_chunk_behind_it() -> None:
    world = World(share=0.0)
    world.meeting.read_down_to(1)
    world.share = 0.1
    world.compute(world.meeting.next(world.head, 0, 0.0).tokens)
    world.share = 0.0
    for _ in range(9):
        assert world.meeting.next(world.head, 1, 0.0).action is Action.WAIT
    assert world.meeting.next(world.head, 1, 99.0).tokens == 2 * LEAST_TOKENS
    world.settle()


@pytest.mark.parametrize("decoding", [0, 1])
def test_who_decodes_has_a_step_between_two_chunks(decoding: int) -> None:
    world = World(share=0.9)  # nothing comes, and waiting for it would not pay
    world.meeting.read_down_to(1)
    actions = []
    for _ in range(4):
        step = world.meeting.next(world.head, decoding, 0.0)
        actions.append(step.action)
        world.compute(min(step.tokens, BLOCK_TOKENS))
    chunk, others = Action.COMPUTE, Action.WAIT
    assert actions == ([chunk, others] * 2 if decoding else [chunk] * 4)
    world.settle()


def test_a_chunk_that_finds_no_place_in_a_batch_is_given_again() -> None:
    world = World(share=0.0)
    world.meeting.read_down_to(1)
    assert world.meeting.next(world.head, 0, 0.0).action is Action.WAIT
    steps = {world.meeting.next(world.head, 0, PATIENCE) for _ in range(20)}
    assert steps == {(Action.COMPUTE, LEAST_TOKENS)}
    world.settle()


@pytest.mark.parametrize(("decoding", "times"), [(0, 1.0), (1, 2.0)])
def test_waiting_has_an_end_and_is_longer_while_others_decode(decoding: int, times: float) -> None:
    world = World(share=0.0)
    world.meeting.read_down_to(6)
    assert world.meeting.next(world.head, decoding, 100.0).action is Action.WAIT
    bound = min(PATIENCE, times * world.split(History(0, [], 0, 1), decoding, False).seconds)
    assert world.meeting.next(0, decoding, 100.0 + bound - 0.01).action is Action.WAIT
    assert world.meeting.next(0, decoding, 100.0 + bound).action is Action.COMPUTE
    world.settle()


def test_nobody_waits_where_computing_a_part_is_faster() -> None:
    world = World(share=0.5)
    world.meeting.read_down_to(6)
    assert world.meeting.next(world.head, 0, 100.0).action is Action.COMPUTE
    world.settle()


def test_while_the_request_waits_for_its_turn_the_source_goes_on_to_the_first_block() -> None:
    world = World(held=1)
    world.meeting.read_down_to(8)
    for _ in range(40):
        world.meeting.wait(world.head)
        world.deliver()
    assert world.meeting.is_here(world.head)
    nodes = world.meeting.join(world.head, 0.0)
    assert nodes is not None and len(nodes) == len(WORD) and all(node.ready for node in nodes)
    world.settle()


def spans(world: World) -> list[tuple[str, int, float]]:
    history = world.meeting.history(world.head, len(WORD), world.now)
    return [(span.tier.value, span.tokens // BLOCK_TOKENS, span.taken) for span in history.coming]


def test_a_read_under_way_counts_from_when_it_was_asked_for_or_the_last_block_came() -> None:
    world = World()
    assert spans(world) == [("disk", 12, 0.0)]
    world.now = 100.0
    world.meeting.read_down_to(8)
    assert spans(world) == [("disk", 8, 0.0), ("disk", 4, 0.0)]
    world.now = 102.0
    assert spans(world) == [("disk", 8, 0.0), ("disk", 4, 2.0)]
    world.meeting.read_down_to(6)
    assert spans(world) == [("disk", 6, 0.0), ("disk", 6, 2.0)]
    world.now = 103.0
    world.deliver()
    assert spans(world) == [("disk", 6, 0.0), ("disk", 6, 0.0)], "one of six has just come"
    world.now = 103.5
    assert spans(world)[1] == ("disk", 6, 0.5)
    world.io.step(at=103.4)  # noticed later than it came
    world.now = 105.0
    world.disk.poll()
    assert spans(world)[1][2] == pytest.approx(1.6)
    world.settle()
    assert {taken for *_, taken in spans(world)} == {0.0}, "nothing is under way"


def test_a_source_that_brings_blocks_of_others_does_not_read_ours_yet() -> None:
    world = World()
    world.disk.fetch(world.path, 0, 2)
    world.meeting.read_down_to(8)
    world.now = 5.0
    assert spans(world)[-1] == ("disk", 4, 5.0)
    world.deliver()
    assert spans(world)[-1] == ("disk", 4, 0.0)
    world.now = 6.0
    assert spans(world)[-1] == ("disk", 4, 1.0)
    world.settle()


def test_each_tier_has_its_own_time() -> None:
    world = World(beyond=6)
    world.meeting.read_down_to(2)
    world.now = 3.0
    assert spans(world) == [("remote", 2, 0.0), ("remote", 4, 3.0), ("disk", 6, 3.0)]
    world.deliver()
    world.now = 4.0
    assert spans(world) == [("remote", 2, 0.0), ("remote", 4, 4.0), ("disk", 6, 1.0)]
    world.settle()


class Slow(World):
    """A store that takes a second for a block, and answers for all of a call at once. The model
    computes a block in the same time."""

    def split(self, history: History, decoding: int, can_restore_early: bool) -> Split | None:
        cost = cost_model(remote=1 / BLOCK_TOKENS, prefill=1 / BLOCK_TOKENS)
        plan = LayerPlan(0, 0, 1)
        return best_split(
            cost, plan, history, decoding=decoding, can_restore_early=can_restore_early
        )


@pytest.mark.parametrize(
    ("now", "computes"), [(0.0, 4), (2.0, 3), (4.0, 2), (6.1, 1), (7.5, 0), (8.0, 0), (30.0, 0)]
)
def test_of_a_call_under_way_only_what_is_left_is_weighed(now: float, computes: int) -> None:
    """A store had eight blocks to read when the first chunk began. Its end shows how long the call
    has taken: what is nearly here is waited for, where all eight used to count as still to come."""
    world = Slow(beyond=len(WORD))
    world.meeting.read_down_to(4)
    world.compute(4 * BLOCK_TOKENS)
    world.now = now
    step = world.meeting.next(world.head, 0, world.now)
    if computes:
        assert step == (Action.COMPUTE, computes * BLOCK_TOKENS)
    else:
        assert step.action is Action.WAIT
    world.settle()


def test_a_call_that_is_overdue_is_waited_for_within_bounds() -> None:
    world = Slow(beyond=len(WORD))
    world.meeting.read_down_to(4)
    world.compute(4 * BLOCK_TOKENS)
    world.now = 30.0
    assert world.meeting.next(world.head, 0, world.now).action is Action.WAIT
    new = world.meeting.new / BLOCK_TOKENS
    assert world.meeting.next(world.head, 0, world.now + new - 1e-6).action is Action.WAIT
    step = world.meeting.next(world.head, 0, world.now + new)
    assert step == (Action.COMPUTE, LEAST_TOKENS)
    world.settle()


OUTCOMES = st.sampled_from([Outcome.OK] * 6 + [Outcome.DAMAGED, Outcome.IO_ERROR])


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_any_order_of_events_ends_with_every_slot_in_one_hand(data: st.DataObject) -> None:
    """Whatever comes when, the request gets to its end, what it restores is its own path from its
    head on, and afterwards nothing of the meeting is left."""
    held = data.draw(st.integers(0, 4), "held")
    world = World(
        slots=data.draw(st.integers(len(WORD), 40), "slots"),
        held=held,
        share=data.draw(st.floats(0, 1), "share"),
    )
    world.meeting.read_down_to(data.draw(st.integers(0, len(WORD) - 1), "low"))
    decoding = data.draw(st.integers(0, 2), "decoding")
    passes, now = 0, 0.0
    while True:
        for _ in range(data.draw(st.integers(0, 5), "events")):
            kinds = ["read", "read", "queue", "abort", "weights", "other"]
            event = data.draw(st.sampled_from(kinds))
            if event == "read":
                world.deliver(data.draw(st.integers(0, 11)), data.draw(OUTCOMES))
            elif event == "other":
                world.fetch_for_another()
            elif event == "queue":
                world.meeting.wait(world.head)
            elif event == "weights" and not world.io.moves:
                world.disk.coming.give_up_all()
            elif event == "abort" and data.draw(st.integers(0, 9)) == 0:
                world.settle()
                return
        now += 0.7
        step = world.meeting.next(world.head, decoding, now)
        passes += 1
        assert passes < 40, "every pass gets on, or waits for a bounded time"
        if step.action is Action.OVER:
            break
        if step.action is Action.RESTORE:
            nodes = world.meeting.join(world.head, now)
            if nodes is not None:
                assert [node.block_id for node in nodes] == world.path.block_ids
                assert all(node.ready for node in nodes[world.head // BLOCK_TOKENS :])
            break
        if step.action is Action.COMPUTE:
            assert step.tokens > 0 and (world.head + step.tokens) % BLOCK_TOKENS == 0
            cut = data.draw(st.sampled_from([step.tokens, max(1, step.tokens - 40)]), "cut")
            try:
                world.compute(cut, saved=data.draw(st.integers(0, 9)) > 0)
            except AssertionError:
                pass  # no room to save it
    world.settle()
