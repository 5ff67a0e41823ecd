"""Records of waiting requests: one per name, from the time it is queued to the time it leaves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.queue.requests import WaitingTable

steps = st.lists(st.tuples(st.sampled_from(["arrive", "leave", "touch"]), st.integers(0, 4)))


@given(steps)
def test_a_record_lives_from_arrival_to_departure(script: list[tuple[str, int]]) -> None:
    table: WaitingTable[int] = WaitingTable()
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
