"""What a benchmark runs, and what it gets: a setting of a sweep, and a run of it on one arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmark.harness.driver import Pace, Run
from sglang_hc.tools.workloads.sessions import Workload


@dataclass(frozen=True)
class Point:
    """One setting of a sweep.

    workload: that of a repeat, the same for all arms; content differs between repeats so that
    nothing is found in a cache by accident. value: the swept quantity, None outside a sweep. rate:
    sessions arriving per second, None when all come at once or by their own times.
    """

    name: str
    value: float | None
    workload: Callable[[int], Workload]
    pace: Pace
    rate: float | None = None


@dataclass
class Cell:
    """One point of one repeat on one arm. load: 1-minute load average when it began."""

    arm: str
    point: str
    repeat: int
    run: Run
    load: float
    flushed: bool
