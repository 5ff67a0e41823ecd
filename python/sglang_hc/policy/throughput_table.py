"""Ways to serve a model that is larger than the device, side by side, as lines of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_hc.policy.throughput import (
    CPU_GBPS,
    CPU_TFLOPS,
    Served,
    Ways,
)

SAME = 0.99
"""The fastest way is the first whose tokens per second are this share of the most."""

NAMES = {
    "sglang": "SGLang's own",
    "ahead": "weights ahead",
    "kv": "KV",
    "act": "ACT",
    "hybrid": "hybrid",
    "cpu": "CPU computes the rest",
}


@dataclass(frozen=True)
class Comparison:
    """Every way at its best batch; None for one that does not fit.

    cpu: the batch with which a CPU that computes the rest generates most, and seconds of its pass;
    infinite where it does not fit. below: of so many requests, and less, it is faster than all
    ways; see `Ways.cpu_faster_below`.
    """

    served: Mapping[str, Served | None]
    fastest: str
    cpu: tuple[int, float]
    below: int

    @property
    def fastest_served(self) -> Served:
        served = self.served[self.fastest]
        assert served is not None
        return served


def compare(ways: Ways) -> Comparison | None:
    """None where no way fits."""
    served = {way: ways.best(way) for way in ways.names}
    rates = {way: one.tokens_per_second for way, one in served.items() if one is not None}
    if not rates:
        return None
    fastest = next(way for way, rate in rates.items() if rate >= SAME * max(rates.values()))
    batch = ways.best_cpu()
    found = served[fastest]
    assert found is not None
    below = ways.cpu_faster_below(max(batch, found.load.requests))
    return Comparison(served, fastest, (batch, ways.cpu_seconds(batch)), below)


def table(found: Comparison) -> list[str]:
    """A head and a line for every way."""
    lines = [
        f"{'':22}{'batch':>7}{'resident':>10}{'KV':>6}{'ACT':>6}{'on device':>11}{'rounds':>8}"
        f"{'s/pass':>8}  {'bound':<9}{'tokens/s':>9}"
    ]
    for way, served in found.served.items():
        lines.append(f"{NAMES[way]:22}{row(served) if served else '  does not fit'}")
    batch, seconds = found.cpu
    shown = "  does not fit"
    if seconds < math.inf:
        shown = f"{batch:7}{'':41}{seconds:8.2f}  {'':9}{batch / seconds:9.1f}"
    return [*lines, f"{NAMES['cpu']:22}{shown}"]


def row(served: Served) -> str:
    """One way in the columns of `table`."""
    split, whole = served.split, served.split.tokens
    act, device = split.act / whole, (split.device_act + split.device_kv) / whole
    return (
        f"{served.load.requests:7}{split.resident:10}{1 - act:6.0%}{act:6.0%}{device:11.0%}"
        f"{served.rounds:8}{served.seconds:8.2f}  {served.times.bound:<9}"
        f"{served.tokens_per_second:9.1f}"
    )


def conclusion(found: Comparison) -> list[str]:
    """What is fastest, and when a CPU is."""
    served = found.fastest_served
    lines = [f"fastest without the CPU: {NAMES[found.fastest]}"]
    if not served.times.link:
        lines[0] += "; nothing crosses, because the weights and the state of this batch fit"
    batch, seconds = found.cpu
    computes = f"a CPU that computes the rest ({CPU_GBPS:g} GB/s, {CPU_TFLOPS:g} TFLOP/s: assumed)"
    if batch / seconds >= served.tokens_per_second:
        lines.append(f"{computes} generates more")
    elif found.below > 1:
        lines.append(f"below {found.below} requests {computes} is faster")
    return lines
