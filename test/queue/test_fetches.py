"""What a fetch saves, and when a place in the queue has its turn."""

from __future__ import annotations

import math

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.fetches import Missing, TurnEstimate
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


def test_turns_are_told_from_the_rate_of_admissions() -> None:
    turns = TurnEstimate()
    assert turns.turn_in(5) == 0.0
    for step in range(10):
        turns.admitted(2, now=step * 4.0)
    assert turns.turn_in(3) == 6.0
    turns.idle()
    turns.admitted(1, now=1e6)  # the pause is not a rate
    assert turns.turn_in(3) == 6.0
