"""Prefetch: order by turn, one fetch per block, nothing that comes too late for its price."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.fetch_costs import Missing
from sglang_hc.queue.prefetch import (
    LOOKED_AT,
    MAX_FETCHES,
    PATIENCE,
    QUIET_PASSES,
    RECHECKED,
    reserve_slots,
)
from support.prefetch_world import FAST_PREFILL, SLOW_PREFILL, World
from support.rates import ConstantRates, UnknownCosts


def test_of_one_turn_the_smaller_first() -> None:
    world = World(SLOW_PREFILL, mode="on-arrival")
    world.arrive("defg", "h", "abc")
    assert world.look() == [("h", "h"), ("abc", "abc"), ("defg", "defg")]


def test_a_request_that_meets_its_history_waits_for_nothing_and_is_looked_at_no_more() -> None:
    world = World(SLOW_PREFILL)
    world.below.meets = {"abc", "def"}
    world.arrive("abc", "def")
    assert world.look() == [("abc", "meet abc"), ("def", "def")], "the turn of one only has come"
    assert world.prefetcher.ready("abc", 0.0)
    assert not world.prefetcher.ready("def", 0.0), "what is under way is waited for"
    for _ in range(40):
        assert world.look() == []


def test_a_history_is_met_at_the_turn_where_it_was_not_worth_fetching() -> None:
    world = World(FAST_PREFILL)
    world.arrive("abc")
    assert world.look() == []
    world.below.meets = {"abc"}
    assert world.prefetcher.ready("abc", 0.0)
    assert world.begun() == [("abc", "meet abc")]


def test_what_would_be_late_is_left_when_recomputing_is_cheaper() -> None:
    # Turns come after 0, 10 and 20 seconds; the disk is busy for ten with the second request.
    world = World(FAST_PREFILL)
    world.arrive("x", "abcdefghij", "klmnopqrstuv")
    assert world.look() == [("abcdefghij", "abcdefghij"), ("klmnopqrstuv", "klmnopqrst")]
    world = World(SLOW_PREFILL)
    world.arrive("x", "abcdefghij", "klmnopqrstuv")
    assert [letters for _, letters in world.look()] == ["x", "abcdefghij", "klmnopqrstuv"]


def test_nothing_is_fetched_for_a_turn_that_has_come_when_recomputing_is_cheaper() -> None:
    for costs, wanted in ((FAST_PREFILL, []), (SLOW_PREFILL, [("ab", "ab")])):
        world = World(costs)
        world.arrive("ab")
        assert world.look() == wanted
        assert world.prefetcher.ready("ab", 0.0) == (not wanted)


def test_a_shared_block_is_fetched_once_and_awaited_by_both() -> None:
    world = World(SLOW_PREFILL)
    world.arrive("sa", "sb")
    assert world.look() == [("sa", "sa"), ("sb", "b")]
    world.prefetcher.cancel("sa")
    world.queue.remove("sa")
    assert not world.prefetcher.ready("sb", 0.0)
    world.come("s")
    assert not world.prefetcher.ready("sb", 0.0)
    world.come("sb")
    assert world.prefetcher.ready("sb", 0.0)
    assert world.look() == [] and world.below.staged == {b"sa"}, "nobody wants the last one"
    world.arrive("sa")
    assert world.look() == [] and not world.prefetcher.ready("sa", 0.0), "it is on its way"


def test_as_much_as_finds_room_begins_and_the_rest_when_there_is_more() -> None:
    world = World(UnknownCosts(), slots=6, blocks=2)
    world.arrive("abcd", "efgh")
    assert world.look() == [("abcd", "abcd"), ("efgh", "ef")]
    world.come()
    assert world.look() == [], "what is needed sooner does not make room"
    world.queue.remove("abcd")
    world.prefetcher.admitted(["abcd"], 100.0)
    assert world.look() == [("efgh", "gh")]


def test_the_reserve_is_kept_free_of_what_nobody_needs() -> None:
    world = World(UnknownCosts(), slots=160)
    world.below.host = dict.fromkeys(bytes([n]) for n in range(160))
    world.arrive("ab")
    world.look()
    assert world.below.kept_free == 8 == world.prefetcher.reserve
    assert len(world.below.host) == 152


def test_the_reserve_holds_two_requests_but_never_a_large_part_of_the_tier() -> None:
    assert reserve_slots(10_000, 30.5) == 61
    assert reserve_slots(160, 30.5) == 10
    assert reserve_slots(10, 30.5) == 0


def test_what_others_evicted_is_fetched_again() -> None:
    world = World(UnknownCosts())
    world.arrive("ab", "cd")
    world.look()
    world.come()
    del world.below.host[b"cd"]
    world.prefetcher.finished("another", 4)
    assert world.look() == [("cd", "d")]


def test_only_near_the_head_what_others_evicted_is_looked_for() -> None:
    requests = [chr(0x4E00 + number) for number in range(RECHECKED + 1)]
    world = World(UnknownCosts(), blocks=1)
    world.arrive(*requests)
    for _ in range(2):  # a burst takes several passes
        world.look()
        world.come()
    last = requests[RECHECKED - 1]
    del world.below.host[last.encode()], world.below.host[requests[RECHECKED].encode()]
    assert world.look() == [(last, last)]


def test_what_failed_is_not_fetched_again_before_the_turn() -> None:
    world = World(UnknownCosts())
    world.arrive("a", "b")
    world.look()
    world.below.staged.clear()
    for block_id in (b"a", b"b"):
        world.prefetcher.fail(block_id)
    assert world.look() == []
    assert not world.prefetcher.ready("b", 0.0)
    assert world.begun() == [("b", "b")]


def test_the_rest_of_a_wait_is_bounded() -> None:
    world = World(UnknownCosts())
    world.arrive("a")
    world.look()
    assert not world.prefetcher.ready("a", 100.0)
    assert not world.prefetcher.ready("a", 100.0 + PATIENCE - 0.01)
    assert world.prefetcher.ready("a", 100.0 + PATIENCE)
    assert world.prefetcher.counters["prefetch_late"] == 1
    world.come()
    assert world.prefetcher.ready("a", 200.0) and world.look() == []


def test_what_a_look_up_found_is_waited_for_no_longer_than_it_saves() -> None:
    """The bound of the look-up's answer held for the fetch behind it, too: 5 s for 0.64 s."""
    world = World(ConstantRates(0.0, BLOCK_TOKENS / 0.64))
    world.below.asking.add("a")
    world.arrive("a")
    assert not world.prefetcher.ready("a", 100.0), "what there is of it is being looked up"
    world.below.asking.clear()
    assert not world.prefetcher.ready("a", 101.0)
    assert world.begun() == [("a", "a")]
    assert not world.prefetcher.ready("a", 101.6)
    assert world.prefetcher.ready("a", 101.7)
    assert world.prefetcher.counters["prefetch_late"] == 1


@pytest.mark.parametrize("mode", ["queue", "on-arrival"])
def test_a_request_whose_blocks_keep_leaving_is_admitted_nevertheless(mode: str) -> None:
    """When a path did not fit at once, every look fetched it again. Each block that came and left
    restarted the wait, so with few slots for many requests no request was ever admitted."""
    world = World(UnknownCosts(), mode, slots=2)
    world.arrive("abc")
    for fetched in range(MAX_FETCHES):
        world.look()
        assert not world.prefetcher.ready("abc", 100.0 + fetched)
        world.come()
        world.below.host.clear()  # for others
    world.look()
    assert world.prefetcher.ready("abc", 100.0 + MAX_FETCHES)
    assert world.look() == []


def test_an_answer_that_is_not_there_yet_is_asked_for_in_every_pass() -> None:
    world = World(UnknownCosts())
    world.below.asking.add("a")
    world.arrive("a")
    for _ in range(5):
        assert world.look() == []
    assert not world.prefetcher.ready("a", 0.0)
    world.below.asking.clear()
    assert world.look() == [("a", "a")]


def test_a_burst_takes_several_passes() -> None:
    world = World(UnknownCosts(), blocks=1)
    names = [chr(200 + number) for number in range(LOOKED_AT + 5)]
    world.arrive(*names)
    assert [len(world.look()) for _ in range(3)] == [LOOKED_AT, 5, 0]


def test_passes_without_an_event_look_at_nothing() -> None:
    world = World(UnknownCosts(), slots=4)
    world.arrive("abcd", "efgh")
    world.look()
    world.come()
    world.look()
    world.below.looks = 0
    for _ in range(10 * QUIET_PASSES):
        world.look()
    assert world.below.looks <= 10


def test_an_admitted_request_is_not_fetched_for() -> None:
    for mode in ("queue", "on-arrival"):
        world = World(UnknownCosts(), mode)
        world.arrive("a")
        world.queue.clear()
        world.prefetcher.admitted(["a"], 100.0)
        assert world.look() == []


WORDS = ["a", "ab", "abc", "abd", "b", "bc", "c"]
events = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "look", "come", "fail", "ask", "admit", "abort"]),
        st.integers(0, 50),
    ),
    max_size=40,
)


@pytest.mark.parametrize("mode", ["queue", "on-arrival"])
@settings(max_examples=200, deadline=None)
@given(history=events, rate=st.floats(0.1, 100), slots=st.integers(2, 6))
def test_late_blocks_pay_and_nothing_is_fetched_twice(
    mode: str, history: list, rate: float, slots: int
) -> None:
    costs = ConstantRates(1.0, BLOCK_TOKENS * rate)
    world = World(costs, mode, slots)
    prefetcher, below = world.prefetcher, world.below
    starts: list[tuple[float, int]] = []
    begin: Callable[..., int] = below.start

    def start(request: str, missing: Missing, first: int, count: int, *rest: Any) -> int:
        starts.append((float(len(below.staged)), count))
        return begin(request, missing, first, count, *rest)

    below.start = start  # type: ignore[method-assign]
    now = 100.0
    for action, number in history:
        now += 1.0
        starts.clear()
        waiting: Iterable[str] = world.queue
        if action == "arrive" and WORDS[number % 7] not in waiting:
            world.arrive(WORDS[number % 7])
        elif action in ("come", "fail") and below.staged:
            block_id = sorted(below.staged)[number % len(below.staged)]
            if action == "come":
                world.come(block_id.decode())
            else:
                below.staged.remove(block_id)
                prefetcher.fail(block_id)
        elif world.queue and action in ("ask", "admit", "abort"):
            request = world.queue[number % len(world.queue)]
            if action == "abort":
                prefetcher.cancel(request)
                world.queue.remove(request)
            elif prefetcher.ready(request, now) and action == "admit":
                world.queue.remove(request)
                prefetcher.admitted([request], now)
            for busy, count in starts:  # its turn is now: all of it is late
                assert busy + count <= count / rate + 1e-6
        else:
            world.look()
        prefetcher.requests.check_integrity()
        assert all(prefetcher.requests[r].awaits <= below.staged for r in prefetcher.requests)
        assert len(below.host) + len(below.staged) <= slots
