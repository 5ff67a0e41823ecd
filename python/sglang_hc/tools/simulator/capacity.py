"""How much DRAM and SSD a target hit rate needs (AttentionStore section 4.3.5).

The measure is injected: a simulation of the user's own load, or anything else that maps bytes to a
hit rate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CapacityPoint:
    """One measured point of the curve."""

    num_bytes: float
    hit_rate: float


def smallest_reaching(
    target: float,
    capacities: Sequence[float],
    measure: Callable[[float], float],
) -> CapacityPoint | None:
    """First of the ascending capacities whose measure reaches `target`; None if none does.

    Bisects, so O(log n) measures: right if a larger capacity is never worse, which holds for every
    policy here up to noise. The result itself is always a measured point that reaches the target.
    """
    measured: dict[int, CapacityPoint] = {}

    def reaches(index: int) -> bool:
        measured[index] = CapacityPoint(capacities[index], measure(capacities[index]))
        return measured[index].hit_rate >= target

    first = bisect_left(range(len(capacities)), True, key=reaches)
    return measured.get(first)
