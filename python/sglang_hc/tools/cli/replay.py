"""`sglang-hc replay`: repeat a server's recorded run in the simulator and compare."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.simulator.recorded import Comparison, replay_record
from sglang_hc.tools.workloads.traces import TraceError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="trace that a server wrote with --hc-trace"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Replay and print. Exit status 0 for the same hits and evictions, 1 otherwise.

    Raises UsageError.
    """
    try:
        comparison = replay_record(args.file)
    except TraceError as error:
        raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps({**dataclasses.asdict(comparison), "equal": comparison.equal}, indent=2))
    else:
        print(describe(comparison))
    return 0 if comparison.equal else 1


def describe(comparison: Comparison) -> str:
    """What was replayed, and the verdict."""
    share = comparison.hit_tokens / max(1, comparison.prompt_tokens)
    text = [
        f"{comparison.admissions} requests admitted, {comparison.prompt_tokens} prompt tokens",
        f"{comparison.device_tokens} tokens hit on the device, {comparison.hit_tokens} in the "
        f"tiers ({100 * share:.1f} % of the prompts), {comparison.disk_tokens} of them from disk",
        f"{comparison.evictions} blocks evicted from the host tier",
    ]
    if comparison.late_tokens:
        text.insert(
            2, f"{comparison.late_tokens} of them by requests that had to wait for the disk"
        )
    different = comparison.difference
    if different is not None:
        text.append(
            f"DIFFERENT from line {different.line} on: {different.what}: the server "
            f"{different.recorded}, the replay {different.replayed}"
        )
    elif comparison.lost_line is not None:
        text.append(
            f"the record has a gap at line {comparison.lost_line}: the writer was behind. Equal up "
            "to there"
        )
    else:
        end = "" if comparison.whole else " (the server did not end the file)"
        text.append(f"the same hits and evictions as the server's, {comparison.lines} lines{end}")
    return "\n".join(text)
