"""Ends below the host tier: what comes back is the end that was stored, or an earlier one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_hc.policy.writing import WriteAdmission, WriteRule
from sglang_hc.store import ends_below, lower_tier
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting
from support.ends_world import STATE, WINDOW, EndsWorld
from support.examples import examples
from support.fake_io import FakeIo
from support.host import path_of
from support.rates import ConstantRates


def test_an_end_comes_back_with_its_blocks() -> None:
    world = EndsWorld()
    world.end("abcd")
    world.settle()
    assert world.parts.held() == {world.part_id("abc"), world.part_id("abcd")}
    assert world.parts.counts == {"disk_saved_end_parts": 2}
    world.forget_host()
    request = world.ask("abcdefg")
    assert len(world.blocks.moves) == 4 and len(world.parts.moves) == 2
    assert not world.ready(request)
    assert world.serve(request, "abcdefg") == 4
    assert world.parts.counts["disk_loaded_end_parts"] == 2
    assert world.queue.counters["prefetches"] == 1
    world.settle()
    assert len(world.parts.held()) == 2, "what came from below is not written again"


@pytest.mark.parametrize("parts_first", [False, True])
def test_parts_and_blocks_may_come_in_any_order(parts_first: bool) -> None:
    world = EndsWorld()
    world.end("abcd")
    world.forget_host()
    request = world.ask("abcd")
    first, second = (world.parts, world.blocks) if parts_first else (world.blocks, world.parts)
    first.end_all()
    world.poll()
    assert world.deepest("abcd") == 0 and not world.ready(request)
    second.end_all()
    world.poll()
    assert world.deepest("abcd") == 4 and world.ready(request)


def test_only_what_host_memory_lacks_is_read() -> None:
    world = EndsWorld()
    world.end("abc", "abcd")
    world.settle()
    world.host.drop(world.path("abcd")[-1])
    assert world.deepest("abcd") == 3
    world.ask("abcd")
    assert [move.block_id for move in world.blocks.moves] == [path_of("abcd").block_ids[3]]
    assert [move.block_id for move in world.parts.moves] == [world.part_id("abcd")]
    world.settle()
    assert world.deepest("abcd") == 4


def test_parts_alone_are_read_where_the_blocks_are_there() -> None:
    world = EndsWorld(STATE, end_slots=1)
    world.end("ab")
    world.settle()
    world.end("xy")
    world.settle()
    assert world.deepest("ab") == 0
    request = world.ask("abc")
    assert not world.blocks.moves and len(world.parts.moves) == 1
    assert world.serve(request, "abc") == 2


def test_a_part_that_leaves_while_the_others_come_costs_the_end() -> None:
    """Its block was computed again meanwhile, without an end."""
    world = EndsWorld()
    world.end("abc", "abcd")
    world.settle()
    world.host.drop(world.path("abcd")[-1])
    world.keep("abcd")
    world.ask("abcd")
    assert len(world.parts.moves) == 1 and world.deepest("abcd") == 3
    world.host.drop_branch(world.path("abc")[-1])
    world.keep("abcd")
    world.settle()
    assert world.deepest("abcd") == 0 and world.ends.free_slots == 12


def test_nothing_is_read_behind_the_last_end() -> None:
    """Blocks that nobody can continue are of no use."""
    world = EndsWorld()
    world.end("ab")
    world.keep("abcdef")
    world.forget_host()
    world.ask("abcdefg")
    assert [move.block_id for move in world.blocks.moves] == list(path_of("ab").block_ids)
    world = EndsWorld()
    world.keep("abcd")
    world.forget_host()
    request = world.ask("abcd")
    assert not world.blocks.moves and world.ready(request)


@pytest.mark.parametrize(("back", "found"), [(3, 3), (2, 0)])
def test_an_end_is_looked_for_so_far_back(
    monkeypatch: pytest.MonkeyPatch, back: int, found: int
) -> None:
    """Behind those that a store is asked for, too."""
    monkeypatch.setattr(ends_below, "LOOKED_BACK", back)
    monkeypatch.setattr(ends_below, "ASKED", 1)
    world = EndsWorld()
    world.end("abc")
    world.keep("abcde")
    world.forget_host()
    assert world.below.find(path_of("abcde"), 5) is not None
    request = world.ask("abcde")
    assert world.serve(request, "abcde") == found


@pytest.mark.parametrize("asked", [1, 3])
def test_a_store_that_does_not_say_is_asked_for_the_last_ends(
    monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    monkeypatch.setattr(ends_below, "ASKED", asked)
    world = EndsWorld()
    world.keep("abcde")
    names: list[object] = []
    monkeypatch.setattr(world.parts, "ask", lambda wanted: bool(names.append(wanted[0])))
    found = world.below.find(path_of("abcde"), 5)
    assert found is not None and found.blocks == 0
    assert names == [world.part_id(word) for word in ("abcde", "abcd", "abc")][:asked]


def test_an_earlier_end_is_used_where_a_part_was_lost() -> None:
    world = EndsWorld()
    world.end("abc", "abcdef")
    world.forget_host()
    world.parts.evict(world.part_id("abcde"))
    request = world.ask("abcdef")
    assert world.serve(request, "abcdef") == 3


@pytest.mark.parametrize("outcome", [Outcome.DAMAGED, Outcome.IO_ERROR, Outcome.MISSING])
def test_a_part_that_is_no_good_makes_the_match_shorter_and_is_counted(outcome: Outcome) -> None:
    world = EndsWorld()
    world.end("abc", "abcdef")
    world.forget_host()
    request = world.ask("abcdef")
    world.parts.evict(world.part_id("abcdef"))
    world.parts.end_all(outcome)
    world.blocks.end_all()
    world.poll()
    assert world.parts.counts[f"disk_read_{outcome.value}"] == 2
    assert world.ends.free_slots == 12 and world.deepest("abcdef") == 0
    assert world.serve(request, "abcdef") == 3


def test_a_block_that_does_not_come_costs_the_end_and_no_slot() -> None:
    world = EndsWorld()
    world.end("abcd")
    world.forget_host()
    request = world.ask("abcd")
    world.parts.end_all()
    world.blocks.step()
    world.blocks.end_all(Outcome.IO_ERROR)
    world.poll()
    assert world.ends.free_slots == 12 and world.ends.staged_slots == 0
    assert world.serve(request, "abcd") == 0


def test_a_slot_that_a_read_may_still_write_gets_no_new_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk hangs; its answer comes after all."""
    for module in (lower_tier, ends_below):
        monkeypatch.setattr(module, "DRAIN_S", 0.0)
    world = EndsWorld(STATE, end_slots=2)
    world.end("ab")
    world.forget_host()
    world.ask("ab")
    world.disk.drain()
    world.check()
    assert world.parts.counts["disk_read_stuck"] == 1
    assert world.ends.free_slots == 1 and world.ends.stage() is not None
    assert world.ends.stage() is None
    world.parts.end_all()
    world.poll()
    assert world.ends.free_slots == 1


def test_a_read_that_takes_too_long_is_waited_for_no_longer() -> None:
    world = EndsWorld(STATE)
    world.end("ab")
    world.forget_host()
    request = world.ask("ab")
    world.blocks.end_all()
    world.poll()
    assert not world.ready(request)
    world.clock.pass_time(ends_below.READ_DEADLINE_S + 1)
    assert world.ready(request)
    world.poll()
    assert world.parts.counts["disk_read_timed_out"] == 1 and world.ends.free_slots == 12


def test_where_there_is_no_room_for_parts_nothing_is_waited_for() -> None:
    world = EndsWorld(STATE, end_slots=1)
    world.end("ab")
    world.forget_host()
    assert world.ends.stage() is not None
    request = world.ask("ab")
    world.blocks.end_all()
    world.poll()
    assert world.serve(request, "ab") == 0


def test_what_is_not_worth_a_fetch_is_not_fetched_in_parts() -> None:
    """Turns come at once, and a block takes longer to read than to compute."""
    world = EndsWorld(costs=ConstantRates(1.0, 64 * 100))
    world.end("abcd")
    world.forget_host()
    request = world.ask("abcd")
    assert world.ready(request) and not world.blocks.moves and not world.parts.moves


def test_two_requests_wait_for_one_end() -> None:
    world = EndsWorld()
    world.end("abcd")
    world.forget_host()
    one, two = world.ask("abcdx"), world.ask("abcdy")
    assert len(world.parts.moves) == 2
    assert not world.ready(one) and not world.ready(two)
    world.settle()
    assert world.ready(one) and world.ready(two) and world.deepest("abcd") == 4


def test_ends_that_are_forgotten_do_not_come() -> None:
    world = EndsWorld()
    world.end("abcd")
    world.forget_host()
    world.ask("abcd")
    world.below.give_up(lambda namespace: namespace is None)
    world.settle()
    assert world.deepest("abcd") == 0 and world.ends.free_slots == 12


def test_parts_of_erased_blocks_are_erased() -> None:
    world = EndsWorld()
    world.end("abcd")
    world.settle()
    answers: list[object] = []
    world.disk.erase(Forgetting(None), path_of("abcd").block_ids, answers.append)
    world.settle()
    world.poll()  # parts before blocks
    assert not world.parts.held() and not world.blocks.held() and len(answers) == 1


def test_an_end_that_is_asked_for_while_others_are_erased_does_not_come() -> None:
    """It was read before it was erased."""
    world = EndsWorld()
    world.end("abcd")
    world.forget_host()
    world.end("xy")
    answers: list[object] = []
    world.disk.erase(Forgetting(None), path_of("xy").block_ids, answers.append)
    world.ask("abcd")
    assert len(world.parts.moves) == 4, "two are written, and two are read"
    world.parts.step()
    world.parts.step()
    while not answers:
        world.poll()
    world.settle()
    assert world.deepest("abcd") == 0 and world.ends.free_slots == 12 - 2


class BelowMachine(RuleBasedStateMachine):
    """What can be continued has the bytes of its own blocks (`EndsWorld.deepest` compares them)."""

    LAYOUT, END_SLOTS = WINDOW, 5

    def __init__(self) -> None:
        super().__init__()
        self.world = EndsWorld(self.LAYOUT, 9, self.END_SLOTS)
        self.words = {"a"}

    @rule(word=st.text("ab", min_size=1, max_size=6))
    def end(self, word: str) -> None:
        path = self.world.keep(word)
        if len(path) < len(word):
            return
        self.words.add(word)
        for part in self.world.ends.begin(path) or ():
            self.world.fill(part)
            self.world.ends.written(part)

    @rule(word=st.text("ab", min_size=1, max_size=6))
    def ask(self, word: str) -> None:
        if len(self.world.waiting) < 3:
            self.world.ask(word)

    @precondition(lambda self: self.world.waiting)
    @rule(which=st.integers(0, 3))
    def leave(self, which: int) -> None:
        request = self.world.waiting.pop(which % len(self.world.waiting))
        self.world.queue.left(request)
        self.world.look()

    @precondition(lambda self: self.world.waiting)
    @rule()
    def turn(self) -> None:
        if self.world.ready(self.world.waiting[0]):
            self.world.waiting.pop(0)
        self.world.look()

    @rule(good=st.sampled_from([Outcome.OK] * 4 + [Outcome.DAMAGED, Outcome.IO_ERROR]))
    def answer_block(self, good: Outcome) -> None:
        self.world.blocks.step(good)
        self.world.poll()

    @rule(good=st.sampled_from([Outcome.OK] * 4 + [Outcome.DAMAGED, Outcome.IO_ERROR]))
    def answer_part(self, good: Outcome) -> None:
        self.world.parts.step(good)
        self.world.poll()

    @rule(parts=st.booleans(), which=st.integers(0, 9))
    def lose_below(self, parts: bool, which: int) -> None:
        io = self.world.parts if parts else self.world.blocks
        held = sorted(io.held())
        if held:
            io.evict(held[which % len(held)])

    @rule(count=st.integers(1, 9))
    def evict(self, count: int) -> None:
        self.world.host.evict(count, 0.0)

    @rule()
    def clear(self) -> None:
        self.world.disk.coming.give_up_all()
        self.world.below.give_up()
        self.world.host.clear()

    @invariant()
    def ends_are_whole(self) -> None:
        for word in self.words:
            self.world.deepest(word)

    def teardown(self) -> None:
        self.world.settle()
        for request in list(self.world.waiting):
            self.world.queue.left(request)
        self.world.below.give_up()
        self.world.host.clear()
        self.world.check()
        assert self.world.ends.free_slots == self.END_SLOTS, "a slot was lost"


class StateBelowMachine(BelowMachine):
    LAYOUT, END_SLOTS = STATE, 2


TestBelow = BelowMachine.TestCase
TestBelow.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestStateBelow = StateBelowMachine.TestCase
TestStateBelow.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_the_end_of_a_path_is_written_with_its_blocks() -> None:
    """With `--hc-write`. It was refused, since its block was still on its way: a server that was
    started again had the newest turn without its end."""
    io = FakeIo(writes_wait=True)
    world = EndsWorld(blocks_io=io, admission=WriteAdmission(WriteRule(), 1, 0.0))
    world.end("abc")
    nodes = world.path("abc")
    world.disk.path_used(nodes)
    assert not io.moves and not world.parts.moves
    for _ in range(2):
        world.disk.path_used(nodes)
        assert [move.block_id for move in io.moves] == [node.block_id for node in nodes]
        ids = [world.below.part_id(node.block_id) for node in nodes if node.end is not None]
        assert [move.block_id for move in world.parts.moves] == ids != []
