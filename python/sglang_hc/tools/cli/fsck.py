"""`sglang-hc fsck DIR... [--repair]`: verify every block of the disk tier."""

from __future__ import annotations

import argparse
import shlex

import msgspec

from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.disk.fsck import DirectoryReport, check

_SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="directory given to --hc-disk; servers may use it meanwhile",
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="remove damaged blocks; without it nothing is changed",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Check and print. Returns 0 when nothing is wrong any more, 1 when something is."""
    try:
        reports = check(args.directories, args.repair)
    except OSError as error:
        raise UsageError(f"cannot read or write: {error}") from error
    if args.json:
        print(msgspec.json.format(msgspec.json.encode({"directories": reports})).decode())
    else:
        for report in reports:
            print("\n".join(_lines(report)))
    left = [f for report in reports for f in report.findings if not f.repaired]
    if left and not args.json:
        print(f"to repair it: sglang-hc fsck {shlex.join(args.directories)} --repair")
    return 1 if left else 0


def _lines(report: DirectoryReport) -> list[str]:
    lines = [
        f"{report.path}: {report.blocks} blocks verify, {report.bytes_verified / 1e6:.1f} MB read"
    ]
    if report.keyed:
        lines.append(f"  of {report.keyed} of them only the header: they were written with a key")
    for finding in report.findings[:_SHOWN]:
        state = "removed" if finding.repaired else "NOT removed"
        lines.append(f"  {finding.path}: {finding.detail} ({state})")
    if len(report.findings) > _SHOWN:
        lines.append(f"  and {len(report.findings) - _SHOWN} more (--json lists all)")
    if not report.findings:
        lines.append("  nothing wrong")
    return lines
