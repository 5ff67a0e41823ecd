"""What a fetch saves, and when a place in the queue has its turn."""

from __future__ import annotations

import math

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.queue.fetch_costs import Missing, TurnEstimate
from support.host import path_of
from support.rates import ConstantRates

DISK, REMOTE = SourceTier.DISK, SourceTier.REMOTE
RATES = ConstantRates(1.0, BLOCK_TOKENS)
"""A block a second, read or recomputed."""


def test_what_a_fetch_saves_counts_from_what_is_there() -> None:
    missing = Missing(path_of("abcdef"), 2, [SourceTier.DISK] * 3, 0)
    assert missing.saved(RATES, 2, 5) == 3.0
    assert missing.saved(RATES, 0, 5) == 5.0
    on_device = Missing(path_of("abcdef"), 2, [SourceTier.DISK] * 3, 4 * BLOCK_TOKENS)
    assert on_device.saved(RATES, 2, 5) == 1.0, "four of them the device has"
    assert on_device.saved(RATES, 2, 4) == -math.inf


def test_blocks_come_in_time_by_where_they_lie() -> None:
    """The disk reads a block a second, the store one in three, at the same time."""

    class Rates(ConstantRates):
        def block_seconds(self, tier: SourceTier) -> float:
            return {DISK: 1.0, REMOTE: 3.0}.get(tier, 0.0)

    def in_time(sources: str, turn_in: float, busy: int = 0) -> tuple[int, float]:
        tiers = [{"d": DISK, "r": REMOTE, "h": SourceTier.HOST}[letter] for letter in sources]
        missing = Missing(path_of("abcdefghij"), 2, tiers, 0)
        busy_of = {DISK: busy}
        reading = lambda tier: busy_of.get(tier, 0)  # noqa: E731
        return missing.in_time(Rates(0.0, 1.0), reading, 2, 2 + len(tiers), turn_in)

    assert in_time("dddd", 4.0) == (6, 0.0)
    assert in_time("dddd", 3.9) == (5, pytest.approx(0.1))
    assert in_time("dddd", 4.0, busy=2) == (4, 2.0)
    assert in_time("rddd", 3.0, busy=2) == (4, 2.0), "the store is not behind the disk's work"
    assert in_time("drdr", 4.0) == (5, 2.0)
    assert in_time("hhhh", 0.0, busy=9) == (6, 0.0), "host memory has them elsewhere"
    assert in_time("rrrr", math.inf) == (6, 0.0)


def test_turns_are_told_from_the_rate_of_admissions() -> None:
    turns = TurnEstimate()
    assert turns.turn_in(5) == 0.0
    for step in range(10):
        turns.admitted(2, now=step * 4.0)
    assert turns.turn_in(3) == 6.0
    turns.idle()
    turns.admitted(1, now=1e6)  # the pause is not a rate
    assert turns.turn_in(3) == 6.0
