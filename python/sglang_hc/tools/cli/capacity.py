"""`sglang-hc capacity`: how much DRAM and SSD a load needs for a target hit rate."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sglang_hc.policy.eviction import POLICIES
from sglang_hc.tools.cli import buying
from sglang_hc.tools.cli.load import add_load_options, read_setup, turns_bar
from sglang_hc.tools.cli.main import UsageError, number
from sglang_hc.tools.cli.workers import workers
from sglang_hc.tools.simulator.capacity import CapacityPoint, smallest_reaching
from sglang_hc.tools.simulator.run import Setup, simulate, state_bytes
from sglang_hc.tools.workloads.sessions import Workload

STEPS_PER_DOUBLING = 2
SMALLEST_DRAM_BLOCKS = 256


@dataclass(frozen=True)
class Answer:
    """dram, disk: bytes; disk 0 when DRAM alone is enough. curve: measured points, ascending."""

    dram: float
    disk: float
    hit_rate: float
    dram_share: float
    curve: list[CapacityPoint]
    needed: CapacityPoint


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options. Numbers are checked in `run`, so that every mistake reads the same."""
    add_load_options(parser)
    parser.add_argument(
        "--target",
        metavar="SHARE",
        default="0.95",
        help="wanted hit rate: share of the tokens that an endless cache would hit "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--dram-target",
        metavar="SHARE",
        default="0.95",
        help="wanted share of the hits that are in DRAM in time (default: %(default)s)",
    )
    parser.add_argument("--policy", choices=POLICIES, default="queue", help="(default: queue)")
    buying.configure(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the curve as a PNG")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Search, print, and plot if asked. Exit status 1 if the target is out of reach."""
    if args.ttft_p90 is not None:
        return buying.run(args)
    for option in ("--price-file", "--report"):
        if getattr(args, option[2:].replace("-", "_")) is not None:
            raise UsageError(f"{option}: costs are ranked with --ttft-p90 only; add it")
    target = number("--target", args.target, low=0.01, high=1.0)
    dram_target = number("--dram-target", args.dram_target, low=0.0, high=1.0)
    setup = read_setup(args, 0.0, 1.0, args.policy)
    search = _Search(setup, quiet=not sys.stderr.isatty())
    answer = search.answer(target, dram_target)
    if answer is None:
        print(
            f"sglang-hc capacity: no size reaches {target:.0%}: the load reuses too little or "
            "its requests wait for each other; lower --target",
            file=sys.stderr,
        )
        return 1
    if args.plot is not None:
        from sglang_hc.tools.simulator.plots import plot_capacity

        try:
            plot_capacity(answer.curve, target, answer.needed, args.plot)
        except (OSError, ValueError) as error:
            raise UsageError(f"--plot {args.plot}: cannot be written ({error})") from error
    print(_as_json(answer, setup.workload) if args.json else _describe(answer, target))
    return 0


class _Search:
    """Measures sizes by simulation; each size once."""

    def __init__(self, setup: Setup, *, quiet: bool) -> None:
        self._setup = setup
        self._quiet = quiet
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def answer(self, target: float, dram_target: float) -> Answer | None:
        """Search the total first, with DRAM in the paper's proportion, then the least DRAM."""
        slot = self._setup.model.slot_bytes
        largest = state_bytes(self._setup) + SMALLEST_DRAM_BLOCKS * slot
        sizes = _sizes(SMALLEST_DRAM_BLOCKS * slot, largest)

        def total_hit_rate(total: float) -> float:
            return self._measure(*_split(total, slot))[0]

        step = max(1, len(sizes) // 10)
        self._measure_all([_split(size, slot) for size in sizes[::step]])
        point = smallest_reaching(target, sizes[::step], total_hit_rate)
        end = len(sizes) if point is None else sizes.index(point.num_bytes) + 1
        needed = smallest_reaching(target, sizes[max(0, end - step) : end], total_hit_rate)
        if needed is None:
            return None
        drams = [s for s in sizes if s < needed.num_bytes] + [needed.num_bytes]
        reached = smallest_reaching(1.0, drams, self._reaches(needed, target, dram_target))
        dram = reached.num_bytes if reached is not None else needed.num_bytes
        disk = needed.num_bytes if dram < needed.num_bytes else 0.0
        hit_rate, dram_share = self._measure(dram, disk)
        return Answer(dram, disk, hit_rate, dram_share, self._curve(slot, sizes), needed)

    def _reaches(
        self, needed: CapacityPoint, target: float, dram_target: float
    ) -> Callable[[float], float]:
        """1 where a DRAM size, with disk for all that is needed, meets both targets."""

        def measure(dram: float) -> float:
            hit_rate, share = self._measure(
                dram, needed.num_bytes if dram < needed.num_bytes else 0.0
            )
            return float(hit_rate >= target and share >= dram_target)

        return measure

    def _measure_all(self, sizes: list[tuple[float, float]]) -> None:
        """Points of the curve, two at a time."""
        turns = self._setup.workload.num_turns
        jobs = [replace(self._setup, dram=dram, disk=disk) for dram, disk in sizes]
        with (
            turns_bar(len(jobs) * turns, "curve", quiet=self._quiet) as show,
            workers() as pool,
        ):
            rates = pool.map(_rates, jobs)
            for number, ((dram, disk), found) in enumerate(zip(sizes, rates, strict=True), 1):
                self._known[int(dram), int(disk)] = found
                show(number * turns)

    def _measure(self, dram: float, disk: float) -> tuple[float, float]:
        key = (int(dram), int(disk))
        if key not in self._known:
            setup = replace(self._setup, dram=dram, disk=disk)
            label = f"{dram / 1e9:.0f} + {disk / 1e9:.0f} GB"
            with turns_bar(setup.workload.num_turns, label, quiet=self._quiet) as show:
                self._known[key] = _rates(setup, show)
        return self._known[key]

    def _curve(self, slot: int, sizes: list[float]) -> list[CapacityPoint]:
        points = []
        for size in sizes:
            dram, disk = _split(size, slot)
            known = self._known.get((int(dram), int(disk)))
            if known is not None:
                points.append(CapacityPoint(size, known[0]))
        return points


def _rates(setup: Setup, show: Callable[[int], None] | None = None) -> tuple[float, float]:
    """Of what is reusable what was hit, and of that what was in DRAM in time."""
    measures = simulate(setup, show).measures
    hits = measures.hit_tokens
    return (
        hits / measures.reusable if measures.reusable else 0.0,
        (measures.device + measures.host) / hits if hits else 1.0,
    )


def _split(total: float, slot: int) -> tuple[float, float]:
    """DRAM and disk of a total in the search for the total: an eighth, at least a few requests.

    Disk holds what DRAM holds too, so it alone is the total.
    """
    dram = max(total / 8, float(SMALLEST_DRAM_BLOCKS * slot))
    return dram, total if dram < total else 0.0


def _sizes(low: float, high: float) -> list[float]:
    """Sizes from `low` to `high`, each by one factor larger than the one before."""
    steps = 1 + max(1, math.ceil(STEPS_PER_DOUBLING * math.log2(high / low)))
    return [float(size) for size in np.geomspace(low, high, steps)]


def _as_json(answer: Answer, workload: Workload) -> str:
    return json.dumps(
        {
            "workload": workload.name,
            "dram_gb": answer.dram / 1e9,
            "disk_gb": answer.disk / 1e9,
            "hit_rate": answer.hit_rate,
            "dram_share_of_hits": answer.dram_share,
            "curve": [{"gb": p.num_bytes / 1e9, "hit_rate": p.hit_rate} for p in answer.curve],
        },
        indent=2,
    )


def _describe(answer: Answer, target: float) -> str:
    lines = ["      GB  reusable tokens hit"]
    for point in answer.curve:
        mark = "  <- target" if point.num_bytes == answer.needed.num_bytes else ""
        lines.append(f"{point.num_bytes / 1e9:8.1f}  {100 * point.hit_rate:5.1f} %{mark}")
    disk = f"{answer.disk / 1e9:.1f} GB of SSD" if answer.disk else "no SSD"
    lines += [
        "",
        f"{target:.0%} of the reusable tokens need {answer.dram / 1e9:.1f} GB of DRAM and {disk}:",
        f"{100 * answer.hit_rate:.1f} % hit, {100 * answer.dram_share:.1f} % of them in DRAM.",
    ]
    return "\n".join(lines)
