"""`sglang-hc simulate`: hit rates of a load on tiers of given sizes, under one eviction policy."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sglang_hc.config import FLAGS
from sglang_hc.tools.cli.load import (
    add_load_options,
    read_machine,
    read_model,
    read_workload,
    turns_bar,
)
from sglang_hc.tools.cli.main import UsageError, count, number
from sglang_hc.tools.simulator.run import SIMULATED_POLICIES, Result, Setup, simulate


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options. Numbers are checked in `run`, so that every mistake reads the same."""
    add_load_options(parser)
    parser.add_argument("--dram-gb", required=True, metavar="X", help="host tier, 1e9 bytes")
    parser.add_argument("--disk-gb", required=True, metavar="Y", help="disk tier, 1e9 bytes")
    parser.add_argument(
        "--policy",
        choices=SIMULATED_POLICIES,
        default="queue",
        help="eviction in all tiers; belady knows the future and is a bound (default: queue)",
    )
    parser.add_argument(
        "--prefetch",
        choices=FLAGS["prefetch"].choices,
        help="disk to host (default: queue with queue and belady, else off)",
    )
    parser.add_argument(
        "--schedule",
        choices=("fcfs", "ready-first"),
        default="fcfs",
        help="order of admission (default: fcfs)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG of hits and TTFT")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Simulate and print. Exit status 0. Raises UsageError."""
    dram, disk = number("--dram-gb", args.dram_gb), number("--disk-gb", args.disk_gb)
    model = read_model(args)
    setup = Setup(
        workload=read_workload(args),
        model=model,
        dram=dram * 1e9,
        disk=disk * 1e9,
        device=number("--hbm-gb", args.hbm_gb) * 1e9,
        policy=args.policy,
        prefetch=args.prefetch,
        machine=read_machine(args),
        max_batch=count("--batch", args.batch),
        overflow=args.overflow,
        ready_first=args.schedule == "ready-first",
    )
    sizes = setup.sizes
    if not (sizes.device or sizes.host or sizes.disk):
        raise UsageError(
            f"--dram-gb, --disk-gb, --hbm-gb: no tier holds one block of "
            f"{model.slot_bytes / 1e6:.1f} MB; give more"
        )
    if sizes.disk and not sizes.host:
        raise UsageError("--dram-gb: the disk tier works through host memory; give it some")
    with turns_bar(setup.workload.num_turns, "simulate", quiet=not sys.stderr.isatty()) as show:
        result = simulate(setup, show)
    if args.plot is not None:
        from sglang_hc.tools.simulator.plots import plot_result

        try:
            plot_result(result, args.plot)
        except (OSError, ValueError) as error:
            raise UsageError(f"--plot {args.plot}: cannot be written ({error})") from error
    print(json.dumps(result.as_json(), indent=2) if args.json else describe(result))
    return 0


def describe(result: Result) -> str:
    """A table a person can read."""
    data, measures = result.as_json(), result.measures
    rows = [
        ("load", f"{data['workload']}, {measures.turns} turns counted"),
        ("model", f"{data['model']}, {data['layer_plan']}"),
        ("state", f"{result.setup.model.token_bytes / 2**20:.3f} MiB per token"),
        ("policy", f"{data['policy']}, prefetch {data['prefetch']}"),
        ("token hit rate", f"{_percent(data, 'hit_rate')} of prompt tokens"),
        ("", f"{_percent(data, 'reusable_hit_rate')} of what an endless cache would hit"),
        ("turn hit rate", f"{_percent(data, 'turn_hit_rate')} of turns, first turns included"),
        ("", f"{_percent(data, 'returning_turn_hit_rate')} of turns with anything to reuse"),
        ("hits from DRAM", _percent(data, "dram_share_of_hits")),
        ("TTFT", f"median {measures.quantile(0.5):.2f} s, p90 {measures.quantile(0.9):.2f} s"),
        ("simulated", f"{measures.simulated_seconds:.0f} s in {result.seconds:.1f} s"),
    ]
    return "\n".join(f"{name:<16}{text}" for name, text in rows)


def _percent(data: dict[str, object], key: str) -> str:
    value = data[key]
    assert isinstance(value, (int, float))
    return f"{100 * value:.1f} %"
