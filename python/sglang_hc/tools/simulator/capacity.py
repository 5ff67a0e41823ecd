"""How much DRAM and SSD a target hit rate needs (AttentionStore section 4.3.5).

    CCpUT = distinct sessions per time to live * largest session      capacity for every hit
    RCC   = smallest capacity that reaches the target                 found by measuring

The measure is injected: a simulation of the user's own load, or anything else that maps bytes to a
hit rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CapacityPoint:
    """One measured point of the curve."""

    num_bytes: float
    hit_rate: float


def full_capacity(distinct_sessions: int, session_bytes: float) -> float:
    """CCpUT in bytes: every session of one time to live at its largest."""
    return distinct_sessions * session_bytes


def geometric_steps(low: float, high: float, count: int) -> list[float]:
    """`count` capacities from low to high, each a constant factor above the one before."""
    if not 0 < low <= high or count < 2:
        raise ValueError("needs 0 < low <= high and at least 2 steps")
    ratio = (high / low) ** (1 / (count - 1))
    return [low * ratio**i for i in range(count)]


def smallest_reaching(
    target: float,
    capacities: Sequence[float],
    measure: Callable[[float], float],
) -> CapacityPoint | None:
    """First of the ascending capacities whose measure reaches `target`; None if none does.

    Bisects, so O(log n) measures: right if a larger capacity is never worse, which holds for every
    policy here up to noise. The result itself is always a measured point that reaches the target.
    """
    low, high = 0, len(capacities) - 1
    found: CapacityPoint | None = None
    while low <= high:
        middle = (low + high) // 2
        point = CapacityPoint(capacities[middle], measure(capacities[middle]))
        if point.hit_rate >= target:
            found, high = point, middle - 1
        else:
            low = middle + 1
    return found
