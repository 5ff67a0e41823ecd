"""`sglang-hc capacity --ttft-p90`: what to buy, by cost."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from operator import call
from pathlib import Path
from typing import Any

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.tools.cli.load import read_setup
from sglang_hc.tools.cli.main import UsageError, blaming, number
from sglang_hc.tools.cli.workers import workers
from sglang_hc.tools.price_file import read_prices, sample_prices
from sglang_hc.tools.simulator.buying import LESS, Row, enough, served, smallest
from sglang_hc.tools.simulator.costs import with_auto_plan
from sglang_hc.tools.simulator.run import Setup, state_bytes

SAMPLE_TURNS = 4000
"""Of a load with more turns so many are searched, the first ones."""

STEPS = 4
"""Times that what was found in a sample is made larger by a tenth, before it is made larger faster;
and that the first row is made smaller then. Smaller tiers may cost more: the GPUs work longer."""

Sizes = tuple[float, float]
"""Bytes of DRAM and of SSD."""

Way = tuple[str, bool]
"""A form, and whether there is an SSD."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options. Checked when they are used."""
    buying = parser.add_argument_group("what to buy, in place of --target")
    buying.add_argument(
        "--ttft-p90",
        metavar="S",
        help="rank what gets 90 %% of the first tokens out within so many seconds by its cost; "
        "--forms may list several: kv,hidden,auto",
    )
    buying.add_argument(
        "--price-file", metavar="FILE", help="prices by the hour (default: AttentionStore's)"
    )
    buying.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page with plots")


def run(args: argparse.Namespace) -> int:
    """Search, rank, print. Exit status 1 if nothing meets the target."""
    target = number("--ttft-p90", args.ttft_p90, low=1e-6)
    if args.plot is not None:
        raise UsageError("--plot: shows hits, for --target; give --report with --ttft-p90")
    if args.report is not None and (args.report.is_dir() or not args.report.parent.is_dir()):
        raise UsageError(f"--report {args.report}: give a file in a folder that exists")
    prices = sample_prices()
    if args.price_file is not None:
        with blaming("--price-file"):
            prices = read_prices(args.price_file)
    forms = [args.forms] if ":" in args.forms else args.forms.split(",")
    setups = {way: setup for form in forms for way, setup in _ways(args, form)}
    base = next(iter(setups.values()))

    def cost(row: Row) -> float:
        return prices.per_hour(base.model.gpus, row.dram, row.ssd) * row.hours

    def rank(row: Row) -> tuple[bool, float]:
        """Those that meet the target first, each by its cost."""
        return row.p90 > target, cost(row)

    rows = sorted(_search(setups, target), key=rank)
    errors: dict[Row, dict[str, Any]] = {}
    if base.workload.num_turns > SAMPLE_TURNS:
        while rows[0].p90 <= target and rows[0].form != "none" and rows[0] not in errors:
            first = rows[0]
            row, error = _checked(setups[first.form, first.ssd > 0], first, target)
            rows = [replace(row, form=r.form) if _is_same(r, first) else r for r in rows]
            errors |= {r: error for r in rows if _is_same(r, row)}
            rows.sort(key=rank)
    found = [_shown(row, cost(row), row.p90 <= target, errors.get(row)) for row in rows]
    turns = base.workload.num_turns
    answer = {
        "target_ttft_p90": target,
        "prices": {"currency": prices.currency, "source": prices.source},
        "rows": found,
        "searched_turns": min(SAMPLE_TURNS, turns),
        "turns": turns,
        "says": _says(found),
        "sample": _of_sample(found, turns) if turns > SAMPLE_TURNS else [],
    }
    if args.report is not None:
        from sglang_hc.tools.simulator.report import write_report

        try:
            write_report(answer, args.report)
        except OSError as error:
            raise UsageError(f"--report {args.report}: cannot be written ({error})") from error
    print(json.dumps(answer, indent=2) if args.json else _describe(answer))
    return 0 if any(row["meets"] for row in found) else 1


def _is_same(row: Row, other: Row) -> bool:
    """Whether they differ in no more than the name of the form."""
    return replace(row, form=other.form) == other


def _ways(args: argparse.Namespace, form: str) -> list[tuple[Way, Setup]]:
    """A form with an SSD and without. Raises UsageError."""
    setup = read_setup(argparse.Namespace(**{**vars(args), "forms": form}), 0, 1, args.policy)
    alone = setup.model
    if form == "auto":  # as a server without SSD chooses
        alone = with_auto_plan(alone, setup.machine, (SourceTier.HOST,))
    return [((form, True), setup), ((form, False), replace(setup, model=alone))]


def _search(setups: dict[Way, Setup], target: float) -> list[Row]:
    """A row without tiers, and one for each way. What takes longest comes first; ways with one
    layer plan are searched once."""
    jobs: dict[tuple[LayerPlan, bool], Callable[[], Row]] = {}
    for (form, with_ssd), setup in sorted(setups.items(), key=lambda way: not way[0][1]):
        job = partial(_found, form, setup, target, with_ssd)
        jobs.setdefault((setup.model.layout.plan, with_ssd), job)
    nothing = replace(next(iter(setups.values())), dram=0.0, disk=0.0, policy="none")
    with workers() as pool:
        *rows, none = pool.map(call, [*jobs.values(), partial(served, nothing, "none")])
    found = dict(zip(jobs, rows, strict=True))
    named = [
        replace(found[setup.model.layout.plan, with_ssd], form=form)
        for (form, with_ssd), setup in setups.items()
    ]
    return [none, *named]


def _found(form: str, setup: Setup, target: float, with_ssd: bool) -> Row:
    """Of a long load a sample is searched: as in AttentionStore's experiment by parts, the last
    tier grows with the number of sessions."""
    sample = _sample(setup)
    share = len(sample.workload.sessions) / len(setup.workload.sessions)
    is_enough = _IsEnough(sample, form, target)
    slot = setup.model.slot_bytes
    dram, ssd = smallest(is_enough, state_bytes(sample), slot, with_ssd=with_ssd)
    if share == 1:
        return is_enough.row(dram, ssd)
    return _grown(setup, form, (dram, ssd / share) if ssd else (dram / share, 0.0), target)


def _sample(setup: Setup) -> Setup:
    """The first sessions by their arrival, with about SAMPLE_TURNS turns."""
    load, turns = setup.workload, 0
    if load.num_turns <= SAMPLE_TURNS:
        return setup
    sessions = []
    for session in sorted(load.sessions, key=lambda session: session.arrival):
        sessions.append(session)
        turns += len(session.turns)
        if turns >= SAMPLE_TURNS:
            break
    warmup = round(load.warmup_turns * turns / load.num_turns)
    part = replace(load, sessions=tuple(sessions), warmup_turns=warmup)
    return replace(setup, workload=part)


def _grown(setup: Setup, form: str, sizes: Sizes, target: float) -> Row:
    """The whole load with these sizes, or with the smallest that it needs of those that are larger:
    a tenth apart for STEPS, then so many tenths, up to room for all of its state. Where that is not
    enough nothing between is tried: a run of a whole load is what takes the time."""
    dram, ssd = sizes
    last = max(0, math.ceil(math.log(state_bytes(setup) / (ssd or dram), LESS)))

    def larger(step: int) -> Setup:
        return replace(setup, dram=LESS**step * dram, disk=LESS**step * ssd)

    row = enough(larger(0), form, target) if last else None
    if row is not None:
        return row
    best = served(larger(last), form)
    if best.p90 > target:
        return best
    low, high, step = 0, last, STEPS  # the sample is nearly right, most of the time
    while high - low > (1 if high <= STEPS else STEPS):
        step = step if step < high else (low + high) // 2
        row = enough(larger(step), form, target)
        if row is None:
            low, step = step, 2 * step
        else:
            best, high, step = row, step, (low + step) // 2
    return best


def _enough(job: tuple[Setup, str, Sizes, float]) -> Row | None:
    """The load with tiers of these sizes, if they meet the target."""
    setup, form, (dram, ssd), target = job
    return enough(replace(setup, dram=dram, disk=ssd), form, target)


def _checked(setup: Setup, row: Row, target: float) -> tuple[Row, dict[str, Any]]:
    """A row from a sample, made smaller as long as that is enough for the whole load; and by which
    share its tiers shrank."""
    first, steps = row, 0
    with workers() as pool:
        while steps < STEPS:
            sizes = [(row.dram / LESS, row.ssd)] + [(row.dram, row.ssd / LESS)] * bool(row.ssd)
            smaller = pool.map(_enough, [(setup, row.form, one, target) for one in sizes])
            found = next(filter(None, smaller), None)
            if found is None:
                break
            row, steps = found, steps + 1
    return row, {
        "at_least": steps == STEPS,
        "dram": 1 - row.dram / first.dram,
        "ssd": 1 - row.ssd / first.ssd if first.ssd else 0.0,
    }


class _IsEnough:
    """Whether sizes meet the target; simulates each once."""

    def __init__(self, setup: Setup, form: str, target: float) -> None:
        self._setup, self._form, self._target = setup, form, target
        self._known: dict[tuple[int, int], Row | None] = {}

    def __call__(self, dram: float, ssd: float) -> bool:
        key = int(dram), int(ssd)
        if key not in self._known:
            if sys.stderr.isatty():
                print(f"{self._form}: {dram / 1e9:.1f} + {ssd / 1e9:.1f} GB", file=sys.stderr)
            self._known[key] = _enough((self._setup, self._form, (dram, ssd), self._target))
        return self._known[key] is not None

    def row(self, dram: float, ssd: float) -> Row:
        """The numbers of sizes, enough or not."""
        known = self._known.get((int(dram), int(ssd)))
        return known or served(replace(self._setup, dram=dram, disk=ssd), self._form)


def _shown(row: Row, cost: float, meets: bool, error: dict[str, Any] | None) -> dict[str, Any]:
    """A row as it is printed. error: of its sizes, where it was checked."""
    values = asdict(row)
    for name in ("dram", "ssd", "hours", "tokens"):
        del values[name]
    return {
        **values,
        "dram_gb": row.dram / 1e9,
        "ssd_gb": row.ssd / 1e9,
        "meets": meets,
        "cost_per_million_tokens": cost / row.tokens * 1e6 if row.tokens else 0.0,
        "sample_error": error,
    }


def _says(rows: list[dict[str, Any]]) -> str:
    """The answer in a sentence."""
    best = rows[0]
    if not best["meets"]:
        return "nothing meets the target: the GPUs are too slow for this load, or too few"
    if best["form"] == "none":
        return "no tiers are needed: the GPUs alone meet the target"
    if not best["ssd_gb"]:
        return f"an SSD buys nothing: {best['dram_gb']:.1f} GB of DRAM alone are cheapest"
    return f"cheapest: {best['form']}, {best['dram_gb']:.1f} GB DRAM, {best['ssd_gb']:.1f} GB SSD"


def _of_sample(rows: list[dict[str, Any]], turns: int) -> list[str]:
    """What is to be known of sizes that were searched with a part of the turns."""
    return [
        f"sizes were searched with {SAMPLE_TURNS} of {turns} turns; times and costs are of all; "
        "sizes of rows that are not named here may be too large",
        *(_error(row) for row in rows if row["sample_error"]),
    ]


def _error(row: dict[str, Any]) -> str:
    """How far off the sizes of the sample were."""
    off, least = row["sample_error"], "at least " if row["sample_error"]["at_least"] else ""
    ssd = f", {off['ssd']:.0%} less SSD" if row["ssd_gb"] else ""
    return (
        f"{row['form']}, {row['dram_gb']:.1f} + {row['ssd_gb']:.1f} GB, needed {least}"
        f"{off['dram']:.0%} less DRAM{ssd} with all"
    )


def _describe(answer: dict[str, Any]) -> str:
    currency = answer["prices"]["currency"]
    lines = [f"{'form':<16}{'DRAM GB':>9}{'SSD GB':>9}{'p50 s':>8}{'p90 s':>8}{'p99 s':>8}"
             f"  {currency}/1M tokens"]  # fmt: skip
    for row in answer["rows"]:
        times = "".join(f"{row[key]:>8.2f}" for key in ("p50", "p90", "p99"))
        meets = "" if row["meets"] else "  too slow"
        lines.append(
            f"{row['form']:<16}{row['dram_gb']:>9.1f}{row['ssd_gb']:>9.1f}{times}"
            f"  {row['cost_per_million_tokens']:.4g}{meets}"
        )
    if answer["sample"]:
        lines += ["", *answer["sample"]]
    return "\n".join([*lines, "", answer["says"], f"prices: {answer['prices']['source']}"])
