"""`sglang-hc capacity --ttft-p90`: what to buy, by cost."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sglang_hc.tools.cli.load import read_setup
from sglang_hc.tools.cli.main import UsageError, blaming, number
from sglang_hc.tools.price_file import Prices, read_prices, sample_prices
from sglang_hc.tools.simulator.buying import Row, smallest
from sglang_hc.tools.simulator.run import Result, Setup, simulate, state_bytes

WORKERS = 2

SAMPLE_TURNS = 6000
"""Of a load with more turns so many are searched, the first ones."""

STEPS_UP = 4
"""Times that what was found in a sample is made larger, by a tenth, until it is right for all."""


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
    prices = sample_prices()
    if args.price_file is not None:
        with blaming("--price-file"):
            prices = read_prices(args.price_file)
    forms = [args.forms] if ":" in args.forms else args.forms.split(",")
    setups = {}
    for form in forms:
        setups[form] = read_setup(
            argparse.Namespace(**{**vars(args), "forms": form}), 0, 1, args.policy
        )
    rows = _search(setups, target)
    base = next(iter(setups.values()))
    found = _ranked(rows, prices, base.model.gpus, target)
    answer = {
        "target_ttft_p90": target,
        "prices": {"currency": prices.currency, "source": prices.source},
        "rows": found,
        "searched_turns": min(SAMPLE_TURNS, base.workload.num_turns),
        "turns": base.workload.num_turns,
        "says": _says(found),
    }
    if args.report is not None:
        from sglang_hc.tools.simulator.report import write_report

        try:
            write_report(answer, args.report)
        except OSError as error:
            raise UsageError(f"--report {args.report}: cannot be written ({error})") from error
    print(json.dumps(answer, indent=2) if args.json else _describe(answer))
    return 0 if any(row["meets"] for row in found) else 1


def _search(setups: dict[str, Setup], target: float) -> list[Row]:
    """A row without tiers, and for each form one without SSD and one with."""
    base = next(iter(setups.values()))
    rows = [Row.of(simulate(replace(base, dram=0.0, disk=0.0, policy="none")), "none")]
    jobs = [(form, setup, target) for form, setup in setups.items()]
    if len(jobs) == 1:
        return rows + _form(jobs[0])
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as pool:
        for found in pool.map(_form, jobs):
            rows += found
    return rows


def _form(job: tuple[str, Setup, float]) -> list[Row]:
    """Without SSD and with one. Of a long load a sample is searched: as in AttentionStore's
    experiment by parts, the last tier grows with the number of sessions."""
    form, setup, target = job
    sample = _sample(setup)
    share = len(sample.workload.sessions) / len(setup.workload.sessions)
    measured = _Measured(sample, form)
    found = smallest(measured, target, state_bytes(sample), setup.model.slot_bytes)
    if share == 1:
        return [Row.of(measured(*sizes), form) for sizes in found]
    (alone, _), (dram, ssd) = found
    return [
        _grown(setup, form, *sizes, target) for sizes in ((alone / share, 0.0), (dram, ssd / share))
    ]


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


def _grown(setup: Setup, form: str, dram: float, ssd: float, target: float) -> Row:
    """The whole load with these sizes, or with somewhat larger ones that it needs."""
    for step in range(STEPS_UP + 1):
        factor = 1.1**step
        row = Row.of(simulate(replace(setup, dram=factor * dram, disk=factor * ssd)), form)
        if row.p90 <= target:
            break
    return row


class _Measured:
    """Simulates each size once."""

    def __init__(self, setup: Setup, form: str) -> None:
        self._setup, self._form = setup, form
        self._known: dict[tuple[int, int], Result] = {}

    def __call__(self, dram: float, ssd: float) -> Result:
        key = int(dram), int(ssd)
        if key not in self._known:
            if sys.stderr.isatty():
                print(f"{self._form}: {dram / 1e9:.1f} + {ssd / 1e9:.1f} GB", file=sys.stderr)
            result = simulate(replace(self._setup, dram=dram, disk=ssd))
            self._known[key] = replace(result, events=[])  # they are many
        return self._known[key]


def _ranked(rows: list[Row], prices: Prices, gpus: int, target: float) -> list[dict[str, Any]]:
    """Those that meet the target first, each by its cost."""
    found = []
    for row in rows:
        values = asdict(row)
        dram, ssd, hours, tokens = (values.pop(k) for k in ("dram", "ssd", "hours", "tokens"))
        cost = prices.per_hour(gpus, dram, ssd) * hours
        found.append(
            {
                **values,
                "dram_gb": dram / 1e9,
                "ssd_gb": ssd / 1e9,
                "meets": row.p90 <= target,
                "cost_per_million_tokens": cost / tokens * 1e6 if tokens else 0.0,
            }
        )
    return sorted(found, key=lambda row: (not row["meets"], row["cost_per_million_tokens"]))


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
    if answer["searched_turns"] < answer["turns"]:
        lines += ["", f"sizes were searched with {answer['searched_turns']} of {answer['turns']} "
                  "turns: a smaller one may do; times and costs are of all"]  # fmt: skip
    return "\n".join([*lines, "", answer["says"], f"prices: {answer['prices']['source']}"])
