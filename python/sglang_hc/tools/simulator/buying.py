"""The smallest tiers with which a load's first tokens come in time, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sglang_hc.tools.simulator.capacity import smallest_reaching
from sglang_hc.tools.simulator.measures import above, spread
from sglang_hc.tools.simulator.run import Result, Setup, simulate

STEP = 1.08
"""Between two sizes among which is searched."""

LESS = 1.1
"""With so many times less of a tier the target is missed."""

SMALLEST_BLOCKS = 64


@dataclass(frozen=True)
class Row:
    """One way to serve the load. form: what is stored; "none" without tiers. dram, ssd: bytes.
    p50, p90, p99: TTFT in seconds, waiting included. hours, tokens: of the whole load."""

    form: str
    layer_plan: str
    dram: float
    ssd: float
    p50: float
    p90: float
    p99: float
    hours: float
    tokens: int
    restored_share: float

    @classmethod
    def of(cls, result: Result, form: str) -> Row:
        """The numbers of a simulation."""
        measures, setup = result.measures, result.setup
        ttft = spread("ttft", measures.ttft)
        share = measures.restored / measures.prompt_tokens if measures.prompt_tokens else 0.0
        return cls(
            form=form,
            layer_plan=str(setup.model.layout.plan),
            dram=setup.dram,
            ssd=setup.disk,
            p50=ttft["ttft_p50"],
            p90=ttft["ttft_p90"],
            p99=ttft["ttft_p99"],
            hours=measures.gpu.now / 3600,
            tokens=measures.served_tokens,
            restored_share=share,
        )


class _MissedError(Exception):
    """The target is missed, whatever comes."""


def served(setup: Setup, form: str) -> Row:
    """The load with the tiers of `setup`."""
    return Row.of(simulate(setup), form)


def enough(setup: Setup, form: str, target: float) -> Row | None:
    """The same if p90 is at most `target` seconds. None as soon as it cannot be any more, which is
    long before the end where the load is too much."""
    load = setup.workload
    counted = load.num_turns - load.warmup_turns
    left = above("p90", counted) if counted > 0 else 0

    def first(ttft: float) -> None:
        nonlocal left
        left -= ttft > target
        if left < 0:
            raise _MissedError

    try:
        return Row.of(simulate(setup, on_first=first), form)
    except _MissedError:
        return None


IsEnough = Callable[[float, float], bool]
"""Whether so many bytes of DRAM and of SSD meet the target."""


def sizes(low: float, high: float) -> list[float]:
    """From `low` to `high`, each STEP times the one before or a little less."""
    if high <= low:
        return [high]
    steps = math.ceil(math.log(high / low) / math.log(STEP))
    return [low * (high / low) ** (step / steps) for step in range(steps + 1)]


def smallest(
    is_enough: IsEnough, everything: float, block: float, *, with_ssd: bool
) -> tuple[float, float]:
    """(DRAM, SSD) in bytes of the smallest tiers that are enough. With a tenth less of either they
    are not. with_ssd: False for DRAM alone.

    Halving finds where the target is reached if a larger tier is never worse; it may be, where the
    disk is read instead of computing. So what was found is made smaller step by step as long as
    that is enough, DRAM first, which is dearer by far. Where no size is enough the largest are
    returned. everything: bytes of all state. block: of one.
    """
    low = SMALLEST_BLOCKS * block
    everything = max(everything, low)

    def beside(ssd: float) -> Callable[[float], bool]:
        return lambda dram: is_enough(dram, ssd)

    def below(dram: float) -> Callable[[float], bool]:
        return lambda ssd: is_enough(dram, ssd)

    def search(found: Callable[[float], bool]) -> float:
        """The smallest size that is enough, by halving, then by steps."""
        best = smallest_reaching(1.0, sizes(low, everything), lambda size: float(found(size)))
        return everything if best is None else shrunk(best.num_bytes, found)

    def shrunk(size: float, found: Callable[[float], bool]) -> float:
        while size / LESS >= low and found(size / LESS):
            size /= LESS
        return size

    if not with_ssd:
        return search(beside(0.0)), 0.0
    dram = search(beside(everything))
    ssd = search(below(dram))
    before = math.inf
    while dram + ssd < before and is_enough(dram, ssd):
        before = dram + ssd
        dram = shrunk(dram, beside(ssd))
        ssd = shrunk(ssd, below(dram))
    return dram, ssd
