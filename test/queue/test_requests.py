"""Records of waiting requests: one per name, from the time it is queued to the time it leaves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.queue.requests import DEPARTED_WITHIN, RequestTable, departed, without

steps = st.lists(st.tuples(st.sampled_from(["arrive", "leave", "touch"]), st.integers(0, 4)))


@given(steps)
def test_a_record_lives_from_arrival_to_departure(script: list[tuple[str, int]]) -> None:
    table = RequestTable()
    waiting: dict[int, int] = {}  # name: place in the order of arrival
    arrivals = 0
    for step, name in script:
        if step == "arrive":
            arrivals += 1
            waiting[name] = arrivals
            assert table.arrived(name).fetches == 0, "what was known before does not count"
        elif step == "leave":
            waiting.pop(name, None)
            table.left(name)
        elif name in waiting:
            table[name].fetches += 1
        assert set(table) == set(waiting) and len(table) == len(waiting)
        for known in range(5):
            assert table.arrival(known) == waiting.get(known, arrivals + 1)
            assert (known in table) == (known in waiting)


fetches = st.lists(
    st.tuples(
        st.sampled_from(["wait", "wait", "end", "cancel"]), st.integers(0, 4), st.integers(0, 6)
    )
)


@given(fetches)
def test_who_waits_for_what_stays_consistent(history: list) -> None:
    table = RequestTable()
    waits: set[tuple[int, bytes]] = set()
    for action, request, number in history:
        block_id = bytes([number])
        if action == "wait":
            table.wait(request, [block_id])
            waits.add((request, block_id))
        elif action == "end":
            over = {block_id, bytes([request])}
            assert table.ended(over) == Counter(r for r, b in waits if b in over)
            waits = {(r, b) for r, b in waits if b not in over}
        else:
            (table.left if number % 2 else table.stop_waiting)(request)
            waits = {(r, b) for r, b in waits if r != request}
        table.check_integrity()
        assert all(table.is_fetching(r) == any(w == r for w, _ in waits) for r in range(5))


lines = st.lists(st.integers(0, 9), unique=True, max_size=8)


@given(lines, lines)
def test_who_departed_has_left_and_the_others_stand_as_before(old, new):
    gone = departed(old, new)
    if gone is not None:
        stayed = without(old, gone)
        assert new[: len(stayed)] == stayed
        assert not {old[at] for at in gone} & set(new)


@given(st.integers(0, 300), st.sets(st.integers(0, DEPARTED_WITHIN - 1), max_size=40), lines)
def test_departures_near_the_head_and_growth_at_the_tail_are_recognised(length, places, tail):
    old = [f"r{number}" for number in range(length)]
    places = sorted(place for place in places if place < length)
    new = without(old, places) + [f"new{number}" for number in tail]
    assert departed(old, new) == places


def test_a_departure_far_from_the_head_is_left_to_others():
    old = list(range(DEPARTED_WITHIN + 2))
    assert departed(old, old[:-2] + old[-1:]) is None
    assert departed(old, [*old[:-1], -1]) is None
