"""`sglang-hc calibrate`: simulated times beside those that a server recorded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sglang_hc.tools.cli.main import UsageError, blaming, number
from sglang_hc.tools.simulator.calibration import JUDGED, Calibration, calibrate


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options. Numbers are checked in `run`, so that every mistake reads the same."""
    parser.add_argument(
        "--record", required=True, metavar="TRACE", help="what a server's --hc-trace has written"
    )
    parser.add_argument(
        "--profile",
        required=True,
        metavar="FILE",
        help="what `sglang-hc profile` has measured on that machine, with the server's flags",
    )
    parser.add_argument(
        "--tolerance",
        default="0.2",
        metavar="SHARE",
        help="by how much a ratio may differ from 1 (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Compare and print. Exit status 0, or 1 where they differ by more. Raises UsageError."""
    tolerance = number("--tolerance", args.tolerance)
    record = Path(args.record)
    if not record.is_file():
        raise UsageError(f"--record {args.record}: no such file; give one of a server's --hc-trace")
    with blaming("--record, --profile"):
        found = calibrate(record, args.profile)
    outside = found.outside(tolerance)
    if args.json:
        data = {**found.as_json(), "tolerance": tolerance, "outside": outside}
        print(json.dumps(data, indent=2))
    else:
        print(describe(found, tolerance))
    return 1 if outside else 0


def describe(found: Calibration, tolerance: float) -> str:
    """A table a person can read."""
    lines = [f"{'seconds, simulated / measured = ratio':<40}" + "".join(f"{q:>26}" for q in JUDGED)]
    for row in found.rows:
        cells = "".join(
            f"{f'{row.simulated[q]:.3f} / {row.measured[q]:.3f} = {row.ratios[q]:.2f}':>26}"
            for q in JUDGED
        )
        lines.append(f"{f'TTFT, {row.turns}, {row.requests} requests':<40}{cells}")
    simulated, measured = found.simulated_throughput, found.measured_throughput
    ratio = f"{simulated:.2f} / {measured:.2f} = {found.throughput_ratio:.2f}"
    lines.append(f"{'answered tokens a busy second':<40}{ratio:>26}")
    if found.left_out:
        lines.append(f"{found.left_out} requests that left without a token are left out")
    outside = found.outside(tolerance)
    lines.append(
        f"outside of {tolerance:g}: {', '.join(outside)}" if outside else f"within {tolerance:g}"
    )
    return "\n".join(lines)
