"""The smallest tiers with which a load's first tokens come in time, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sglang_hc.tools.simulator.capacity import smallest_reaching
from sglang_hc.tools.simulator.measures import spread
from sglang_hc.tools.simulator.run import Result

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


Measure = Callable[[float, float], Row]
"""Simulates with so many bytes of DRAM and of SSD."""


def sizes(low: float, high: float) -> list[float]:
    """From `low` to `high`, each STEP times the one before or a little less."""
    if high <= low:
        return [high]
    steps = math.ceil(math.log(high / low) / math.log(STEP))
    return [low * (high / low) ** (step / steps) for step in range(steps + 1)]


def smallest(
    measure: Measure, target: float, everything: float, block: float, *, with_ssd: bool
) -> tuple[float, float]:
    """(DRAM, SSD) in bytes of the smallest tiers whose p90 is at most `target` seconds. With a
    tenth less of either the target is missed. with_ssd: False for DRAM alone.

    Halving finds where the target is reached if a larger tier is never worse; it may be, where the
    disk is read instead of computing. So what was found is made smaller step by step as long as
    that is enough, DRAM first, which is dearer by far. Without any size that reaches the target the
    largest are returned. everything: bytes of all state. block: of one.
    """
    low = SMALLEST_BLOCKS * block
    everything = max(everything, low)

    def p90(dram: float, ssd: float) -> float:
        return measure(dram, ssd).p90

    def beside(ssd: float) -> Callable[[float], float]:
        return lambda dram: p90(dram, ssd)

    def below(dram: float) -> Callable[[float], float]:
        return lambda ssd: p90(dram, ssd)

    def search(found: Callable[[float], float]) -> float:
        """The smallest size that is found in time, by halving, then by steps."""
        best = smallest_reaching(-target, sizes(low, everything), lambda size: -found(size))
        return everything if best is None else shrunk(best.num_bytes, found)

    def shrunk(size: float, found: Callable[[float], float]) -> float:
        while size / LESS >= low and found(size / LESS) <= target:
            size /= LESS
        return size

    if not with_ssd:
        return search(beside(0.0)), 0.0
    dram = search(beside(everything))
    ssd = search(below(dram))
    before = math.inf
    while dram + ssd < before and p90(dram, ssd) <= target:
        before = dram + ssd
        dram = shrunk(dram, beside(ssd))
        ssd = shrunk(ssd, below(dram))
    return dram, ssd
