"""`sglang-hc simulate`: what tiers of given sizes hit under a load, and how long it takes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from sglang_hc.config import FLAGS
from sglang_hc.policy.writing import WriteRule
from sglang_hc.tools.cli.load import add_load_options, read_setup, turns_bar
from sglang_hc.tools.cli.main import UsageError, blaming, number
from sglang_hc.tools.simulator.run import AT_TURN, SIMULATED_POLICIES, Result, simulate


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options. Numbers are checked in `run`, so that every mistake reads the same."""
    add_load_options(parser)
    parser.add_argument("--dram-gb", required=True, metavar="X", help="host tier, 1e9 bytes")
    parser.add_argument("--disk-gb", required=True, metavar="Y", help="disk tier, 1e9 bytes")
    parser.add_argument(
        "--policy",
        choices=SIMULATED_POLICIES,
        default="queue",
        help="eviction in all tiers; belady knows the future and is a bound; none: no tiers "
        "(default: queue)",
    )
    parser.add_argument(
        "--prefetch",
        choices=(*(FLAGS["prefetch"].choices or ()), AT_TURN),
        help="disk to host; off: the disk is never read, as in the server; at-turn: when a request "
        "is admitted (default: queue with queue and belady, else at-turn)",
    )
    write = FLAGS["write"]
    parser.add_argument("--write", default="all", metavar=write.metavar, help=write.help)
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
    setup = read_setup(args, dram * 1e9, disk * 1e9, args.policy)
    serving = replace(setup.serving, ready_first=args.schedule == "ready-first")
    with blaming("--write"):
        WriteRule.parse(args.write)
    setup = replace(setup, write=args.write, prefetch=args.prefetch, serving=serving)
    sizes = setup.sizes
    if args.policy == "none":
        if dram or disk:
            raise UsageError("--policy none keeps nothing: give --dram-gb 0 --disk-gb 0")
    elif not (sizes.device or sizes.host or sizes.disk):
        raise UsageError(
            f"--dram-gb, --disk-gb, --hbm-gb: no tier holds one block of "
            f"{setup.model.slot_bytes / 1e6:.1f} MB; give more, or --policy none"
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
    data, measures, gpu = result.as_json(), result.measures, result.measures.gpu
    rows = [
        ("load", f"{data['workload']}, {measures.turns} turns counted"),
        ("model", f"{data['model']}, {data['layer_plan']}"),
        ("state", f"{result.setup.model.token_bytes / 2**20:.3f} MiB per token"),
        ("policy", f"{data['policy']}, prefetch {data['prefetch']}"),
        ("token hit rate", f"{_percent(data, 'hit_rate')} of prompt tokens"),
        ("", f"{_percent(data, 'restored_share')} restored, as that was faster than computing"),
        ("", f"{_percent(data, 'reusable_hit_rate')} of what an endless cache would hit"),
        ("turn hit rate", f"{_percent(data, 'turn_hit_rate')} of turns, first turns included"),
        ("", f"{_percent(data, 'returning_turn_hit_rate')} of turns with anything to reuse"),
        ("hits from DRAM", _percent(data, "dram_share_of_hits")),
        ("waiting", _times(data, "queue_wait")),
        ("then TTFT", _times(data, "service_ttft")),
        ("together", _times(data, "ttft")),
        (
            "GPU time",
            f"prefill {gpu.prefill:.0f} s, decode {gpu.decode:.0f} s, idle {gpu.idle:.0f} s",
        ),
        ("written", f"{data['disk_written_gb']:.1f} GB to disk"),
        ("output", f"{data['output_tokens_per_second']:.1f} tokens/s"),
        ("simulated", f"{gpu.now:.0f} s in {result.seconds:.1f} s"),
    ]
    return "\n".join(f"{name:<16}{text}" for name, text in rows)


def _times(data: dict[str, object], name: str) -> str:
    mean, median, p90, p99 = (data[f"{name}_{which}"] for which in ("mean", "p50", "p90", "p99"))
    return f"median {median:.2f} s, mean {mean:.2f}, p90 {p90:.2f}, p99 {p99:.2f}"


def _percent(data: dict[str, object], key: str) -> str:
    value = data[key]
    assert isinstance(value, (int, float))
    return f"{100 * value:.1f} %"
