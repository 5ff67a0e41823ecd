"""Simulated times beside those that a server recorded, and whether they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_hc.errors import ConfigError
from sglang_hc.profile_file import read_profile
from sglang_hc.tools.simulator.costs import MeasuredMachine
from sglang_hc.tools.simulator.measures import QUANTILES, spread
from sglang_hc.tools.simulator.replay import Times, replay
from sglang_hc.tools.workloads.recorded import Record, linked, read_record
from sglang_hc.tree.identity import TOKEN_BYTES

LEAST = 10
"""Requests of which quantiles say something; turns with fewer count with those before."""

JUDGED = ("p50", "p90")

ALL = "all"


@dataclass(frozen=True)
class Compared:
    """TTFT of the requests of some turns. Seconds by quantile."""

    turns: str
    requests: int
    measured: dict[str, float]
    simulated: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Simulated over measured."""
        return {name: self.simulated[name] / max(self.measured[name], 1e-9) for name in JUDGED}


@dataclass(frozen=True)
class Calibration:
    """rows: by turn, behind one of all requests. Throughput: tokens of answers for each second in
    which the server had a request. left_out: requests without a token."""

    rows: tuple[Compared, ...]
    measured_throughput: float
    simulated_throughput: float
    left_out: int

    @property
    def throughput_ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated_throughput / max(self.measured_throughput, 1e-9)

    def outside(self, tolerance: float) -> list[str]:
        """What is further from 1 than the tolerance, by name. TTFT is judged by turn: the middle
        of all requests may lie between two kinds of them."""
        ratios = {"throughput": self.throughput_ratio}
        for row in self.rows:
            if row.turns != ALL:
                ratios |= {f"TTFT {name}, {row.turns}": r for name, r in row.ratios.items()}
        return [name for name, ratio in ratios.items() if abs(ratio - 1) > tolerance]

    def as_json(self) -> dict[str, object]:
        """Seconds, tokens a second, and ratios of simulated over measured."""
        return {
            "ttft": [
                {
                    "turns": row.turns,
                    "requests": row.requests,
                    "measured": row.measured,
                    "simulated": row.simulated,
                    "ratio": row.ratios,
                }
                for row in self.rows
            ],
            "throughput": {
                "measured": self.measured_throughput,
                "simulated": self.simulated_throughput,
                "ratio": self.throughput_ratio,
            },
            "requests_left_out": self.left_out,
        }


def calibrate(record: Path, profile: str) -> Calibration:
    """Serve a record again by a profile. Raises ConfigError for files that do not fit together, or
    say too little."""
    machine = MeasuredMachine(read_profile(profile), profile)
    found = read_record(record)
    if found.lost:
        raise ConfigError(f"{record}: {found.lost} events are missing; record with less load")
    return compared(found, machine)


def compared(record: Record, machine: MeasuredMachine) -> Calibration:
    """As `calibrate`. Requests that left without a token are left out."""
    requests = [request for request in record.requests if request.first is not None]
    if len(requests) < LEAST:
        raise ConfigError(
            f"the record has {len(requests)} answered requests; record at least {LEAST}"
        )
    replayed = replay(requests, record.served, machine)
    left_out = len(record.requests) - len(requests)
    tokens = sum(len(request.answer) // TOKEN_BYTES + 1 for request in requests)
    ordered = sorted(replayed.times, key=lambda times: times.request.arrived)
    return Calibration(
        (_compared(ALL, ordered), *(_compared(*turn) for turn in _by_turn(ordered))),
        tokens / max(replayed.measured_busy, 1e-9),
        tokens / max(replayed.simulated_busy, 1e-9),
        left_out,
    )


def _compared(name: str, times: Sequence[Times]) -> Compared:
    measured = spread("", [one.measured for one in times])
    simulated = spread("", [one.simulated for one in times])
    names = ("mean", *QUANTILES)
    return Compared(
        name,
        len(times),
        {which: measured[f"_{which}"] for which in names},
        {which: simulated[f"_{which}"] for which in names},
    )


def _by_turn(ordered: Sequence[Times]) -> list[tuple[str, list[Times]]]:
    """Requests by turn of their conversations. The last turns are one where each has less than
    LEAST of them, with the turn before if need be."""
    of = {id(times.request): times for times in ordered}
    turns: list[list[Times]] = []
    for talk in linked([times.request for times in ordered]):
        for number, request in enumerate(talk):
            turns += [[]] if number == len(turns) else []
            turns[number].append(of[id(request)])
    full = next((n for n, turn in enumerate(turns) if len(turn) < LEAST), len(turns))
    rest = [times for turn in turns[full:] for times in turn]
    while rest and len(rest) < LEAST and full:
        full -= 1
        rest = turns[full] + rest
    found = [(f"turn {number}", turn) for number, turn in enumerate(turns[:full], 1)]
    return [*found, (f"turn {full + 1} and later", rest)] if rest else found
