"""Storms: the real scheduler among clients, operators, disks and clocks, all from one seed.

    python -m support.storms --seeds 0:1000

No answer may differ from those of an engine that never evicts, every request ends, every invariant
holds. A seed that shows otherwise prints a program that repeats its storm.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from support import storm_models
from support.core import run_in_child
from support.storm_actions import Clock, Phase, Send, Storm, phases
from support.storm_engine import Fate, Outcome, play
from support.storm_oracle import Answer, Oracle
from support.storm_plans import storm_of
from support.storm_record import Record, page_count

NEAR = 1e-3
"""Log probabilities differ by less: float32, whatever the order of additions."""


@dataclass
class Report:
    """Of one storm. wrong: sentences, none for a storm that was served well."""

    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def run(storm: Storm, oracle: Oracle) -> Report:
    """Carry out a storm and judge it."""
    report, wall = Report(), 0.0
    with tempfile.TemporaryDirectory(prefix="storm-", ignore_cleanup_errors=True) as folder:
        for number, phase in enumerate(phases(storm)):
            oracle.learn(phase.asks)
            seed = f"weather {storm.seed} {number}"
            try:
                outcome = run_in_child(play, phase, oracle, folder, seed, wall)
            except AssertionError as error:
                report.wrong.append(f"engine {number}: {error}")
                break
            _judge(report, number, phase, outcome, oracle)
            wall += outcome.passes + sum(
                action.wall + action.monotonic
                for action in phase.actions
                if isinstance(action, Clock)
            )
    report.counts["storms"] += 1
    return report


def _judge(report: Report, number: int, phase: Phase, outcome: Outcome, oracle: Oracle) -> None:
    counts = report.counts
    counts["engines"] += 1
    counts[page_count(phase.engine.page)] += 1
    counts["passes"] += outcome.passes
    counts["evicted tokens"] += outcome.evicted
    sends = [action for action in phase.actions if isinstance(action, Send)]
    for place, (send, ask, fate) in enumerate(zip(sends, phase.asks, outcome.fates, strict=True)):
        counts["requests"] += 1
        counts["aborted"] += fate.aborted
        counts["retractions"] += fate.retracted
        counts["restored tokens"] += fate.restored
        counts["disk tokens"] += fate.disk
        counts["shared tokens"] += fate.shared
        wrong = _compare(fate, oracle[ask], counts)
        if wrong is None and phase.clean and not fate.aborted:
            if not fate.finished:
                wrong = "was never answered"
            elif len(fate.tokens) != send.new:
                wrong = f"has {len(fate.tokens)} tokens of {send.new}"
        if wrong is not None:
            counts["differences"] += 1
            report.wrong.append(f"engine {number}, request {place}, {send}: {wrong} ({fate})")
    for name, value in outcome.counts.items():
        counts[f"hc {name}"] += value
    if outcome.counts.get("audit_differences"):
        report.wrong.append(f"engine {number}: an audit found a wrong block")


def _compare(fate: Fate, answer: Answer, counts: Counter[str]) -> str | None:
    """What is wrong with the tokens that there are, if anything is."""
    for step, token in enumerate(fate.tokens):
        if token != answer.tokens[step]:
            if answer.gaps[step] < NEAR:
                counts["near ties"] += 1
                return None
            return f"token {step} is {token} in place of {answer.tokens[step]}"
        if step < len(fate.likely) and abs(fate.likely[step] - answer.likely[step]) > NEAR:
            found, wanted = fate.likely[step], answer.likely[step]
            return f"token {step} has log probability {found:.4f} in place of {wanted:.4f}"
    return None


def shrink(storm: Storm, oracle: Oracle, tries: int = 40) -> Storm:
    """A storm with fewer actions that fails too; halves, quarters and so on are left out."""
    size = len(storm.actions) // 2
    while size and tries:
        start = 0
        while start < len(storm.actions) and tries:
            tries -= 1
            fewer = storm.actions[:start] + storm.actions[start + size :]
            smaller = replace(storm, actions=fewer)
            if run(smaller, oracle).wrong:
                storm = smaller
            else:
                start += size
        size //= 2
    return storm


def script(storm: Storm) -> str:
    """A program that repeats a storm, to be run in test/."""
    actions = "".join(f"    {action!r},\n" for action in storm.actions)
    return (
        "from support.storm_actions import *\n"
        "from support.storms import repeat\n\n"
        f"repeat(Storm({storm.engine!r}, (\n{actions}), seed={storm.seed}))\n"
    )


def repeat(storm: Storm) -> None:
    """Carry out one storm and print what was wrong. Ends the program with 1 if anything was."""
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        report = run(storm, Oracle(Path(folder)))
    print("\n".join(report.wrong) or "nothing was wrong")
    sys.exit(bool(report.wrong))


def learn(seeds: Iterable[int], oracle: Oracle, kind: str = "") -> None:
    """Ask for the answers of many storms at once."""
    storms = (storm_of(seed, kind) for seed in seeds)
    oracle.learn(ask for storm in storms for phase in phases(storm) for ask in phase.asks)


def _seeds(text: str) -> Sequence[int]:
    first, colon, end = text.partition(":")
    return range(int(first), int(end)) if colon else [int(one) for one in text.split(",")]


SHOWN = (
    "storms", "engines", "requests", "evicted tokens", "restored tokens", "disk tokens",
    "shared tokens", "aborted", "retractions", "near ties", "differences",
)  # fmt: skip


TURN = 5
"""Seeds of a kind before it is another one's turn."""


def turns(
    seeds: Sequence[int], kinds: Sequence[str], record: Record | None
) -> Iterator[tuple[str, list[int]]]:
    """A kind and seeds of it in turn, without those that the record has."""
    for first in range(0, len(seeds), TURN):
        for kind in kinds:
            some = list(seeds[first : first + TURN])
            yield kind, some if record is None else record.lacks(kind, some)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m support.storms")
    parser.add_argument("--seeds", default="0:20", help="FIRST:END, or some: 3,17,40")
    parser.add_argument("--cache", type=Path, help="folder for answers (default: a new one)")
    parser.add_argument(
        "--kind", nargs="+", default=[""], choices=("", *storm_models.KINDS),
        help=f"models; of several each has {TURN} seeds in turn (default: full attention)",
    )  # fmt: skip
    parser.add_argument(
        "--record", type=Path, help="file to add to; what it has is left out. What never happened "
        "in all storms of a kind is an error",
    )  # fmt: skip
    parser.add_argument("--shrink", action="store_true", help="look for a shorter storm")
    args = parser.parse_args(argv)
    record = Record(args.record) if args.record else None
    failed, counts = 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        oracle = Oracle(args.cache or Path(folder))
        for kind, seeds in turns(_seeds(args.seeds), args.kind, record):
            learn(seeds, oracle, kind)
            for seed in seeds:
                began, storm = time.monotonic(), storm_of(seed, kind)
                report = run(storm, oracle)
                counts += report.counts
                if record is not None:
                    record.add(kind, seed, report.counts, bool(report.wrong))
                took = time.monotonic() - began
                print(f"{kind} seed {seed}: {len(report.wrong)} wrong, {took:.1f} s", flush=True)
                if report.wrong:
                    failed += 1
                    print("\n".join(report.wrong))
                    print(script(shrink(storm, oracle) if args.shrink else storm), flush=True)
    print(", ".join(f"{name} {counts[name]}" for name in SHOWN))
    print({name: value for name, value in sorted(counts.items()) if name.startswith("hc ")})
    gaps = [] if record is None else [gap for kind in args.kind for gap in record.gaps(kind)]
    print("\n".join(gaps), end="\n" * bool(gaps))
    return int(failed > 0 or bool(gaps))


if __name__ == "__main__":
    sys.exit(main())
