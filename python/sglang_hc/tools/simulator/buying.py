"""The smallest tiers with which a load's first tokens come in time, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_hc.tools.simulator.capacity import smallest_reaching
from sglang_hc.tools.simulator.measures import spread
from sglang_hc.tools.simulator.run import Result

STEP = 1.08
"""Between two sizes: what is found is at most by so much larger than the smallest."""

SMALLEST_BLOCKS = 64

Measure = Callable[[float, float], Result]
"""Simulates with so many bytes of DRAM and of SSD."""


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


def sizes(low: float, high: float) -> list[float]:
    """From `low` to `high`, each STEP times the one before or a little less."""
    if high <= low:
        return [high]
    steps = math.ceil(math.log(high / low) / math.log(STEP))
    return [low * (high / low) ** (step / steps) for step in range(steps + 1)]


def smallest(
    measure: Measure, target: float, everything: float, block: float
) -> Sequence[tuple[float, float]]:
    """(DRAM, SSD) in bytes of the smallest tiers whose p90 is at most `target` seconds: DRAM alone,
    and DRAM with an SSD. DRAM is made small first, with an SSD for everything: it is dearer by far.
    Where a tier larger than needed does not help, what is found is right; without any that reach
    the target the largest are returned. everything: bytes of all state. block: of one.
    """
    low = SMALLEST_BLOCKS * block
    everything = max(everything, low)

    def p90(dram: float, ssd: float) -> float:
        return -spread("ttft", measure(dram, ssd).measures.ttft)["ttft_p90"]

    def search(found: Callable[[float], float]) -> float:
        best = smallest_reaching(-target, sizes(low, everything), found)
        return everything if best is None else best.num_bytes

    alone = search(lambda dram: p90(dram, 0.0))
    above = search(lambda dram: p90(dram, everything))
    ssd = search(lambda size: p90(above, size))
    return [(alone, 0.0), (above, ssd)]
