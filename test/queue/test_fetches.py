"""Who waits for which block, what a fetch saves, and when a place in the queue has its turn."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.fetches import Fetches, Missing, TurnEstimate
from support.rates import ConstantRates

RATES = ConstantRates(1.0, BLOCK_TOKENS)
"""A block a second, read or recomputed."""


def ids(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def test_what_a_fetch_saves_counts_from_what_is_there() -> None:
    missing = Missing(ids("abcdef"), 2, 3, 0, 6 * BLOCK_TOKENS)
    assert missing.saved(RATES, 2, 5) == 3.0
    assert missing.saved(RATES, 0, 5) == 5.0
    on_device = Missing(ids("abcdef"), 2, 3, 4 * BLOCK_TOKENS, 6 * BLOCK_TOKENS)
    assert on_device.saved(RATES, 2, 5) == 1.0, "four of them the device has"
    assert on_device.saved(RATES, 2, 4) == -math.inf


def test_a_block_stays_under_way_when_nobody_waits_for_it_any_more() -> None:
    fetches: Fetches[str] = Fetches()
    for request, block_ids in (("one", "sa"), ("two", "sb")):
        for block_id in ids(block_ids):
            fetches.wait(request, block_id)
    assert len(fetches) == 3
    fetches.cancel("one")
    assert b"a" in fetches and not fetches.awaited_by("one")
    assert fetches.ended(b"s") == {"two"} and fetches.awaited_by("two")
    assert fetches.ended(b"b") == {"two"} and not fetches.awaited_by("two")
    assert fetches.ended(b"a") == set() and not fetches
    assert fetches.ended(b"z") == set(), "never asked for"


steps = st.lists(
    st.tuples(
        st.sampled_from(["wait", "wait", "end", "cancel"]), st.integers(0, 4), st.integers(0, 6)
    )
)


@given(steps)
def test_who_waits_for_what_stays_consistent(history: list) -> None:
    fetches: Fetches[int] = Fetches()
    waits: set[tuple[int, bytes]] = set()
    flying: set[bytes] = set()
    for action, request, number in history:
        block_id = bytes([number])
        if action == "wait":
            fetches.wait(request, block_id)
            waits.add((request, block_id))
            flying.add(block_id)
        elif action == "end":
            assert fetches.ended(block_id) == {r for r, b in waits if b == block_id}
            waits = {(r, b) for r, b in waits if b != block_id}
            flying.discard(block_id)
        else:
            fetches.cancel(request)
            waits = {(r, b) for r, b in waits if r != request}
        fetches.check_integrity()
        assert len(fetches) == len(flying)
        assert all(fetches.awaited_by(r) == any(w == r for w, _ in waits) for r in range(5))


def test_turns_are_told_from_the_rate_of_admissions() -> None:
    turns = TurnEstimate()
    assert turns.turn_in(5) == 0.0
    for step in range(10):
        turns.admitted(2, now=step * 4.0)
    assert turns.turn_in(3) == 6.0
    turns.idle()
    turns.admitted(1, now=1e6)  # the pause is not a rate
    assert turns.turn_in(3) == 6.0
