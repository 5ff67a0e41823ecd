"""`sglang-hc inspect DIR...`: what lies in the directories of the disk tier."""

from __future__ import annotations

import argparse
import time

import msgspec

from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.disk.summary import DirectorySummary, ModelSummary, summarize


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="directory given to --hc-disk; may be in use by a server",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the summary of each directory. Returns 0."""
    try:
        summaries = [summarize(path) for path in args.directories]
    except OSError as error:
        raise UsageError(f"{error}; run this as the user of the server") from error
    if args.json:
        print(msgspec.json.format(msgspec.json.encode({"directories": summaries})).decode())
        return 0
    for summary in summaries:
        print("\n".join(_lines(summary, time.time())))
    return 0


def _lines(summary: DirectorySummary, now: float) -> list[str]:
    users = ", ".join(summary.used_by)
    state = f"in use by process {users}" if users else "not in use"
    lines = [f"{summary.path}: {_size(summary.file_bytes)} of blocks, {state}"]
    for model in summary.models:
        lines += _model_lines(model, now)
    if not any(model.blocks for model in summary.models):
        lines.append("  no blocks")
    return lines


def _model_lines(model: ModelSummary, now: float) -> list[str]:
    part = f", part {model.part}" if model.part else ""
    unreadable = f", {model.unreadable} unreadable" if model.unreadable else ""
    lines = [
        f"  model {_shown(model.label)} ({model.fingerprint}{part}): {model.blocks} blocks of "
        f"{_size(model.file_bytes)}{unreadable}"
    ]
    if not model.namespaces:
        return lines
    row = "    {:<24} {:>9} {:>10} {:>12} {:>12} {:>12}".format
    lines.append(row("namespace", "blocks", "bytes", "oldest", "newest", "last use"))
    lines += [
        row(
            _shown(one.namespace or "(none)")[:24],
            one.blocks,
            _size(one.blocks * model.file_bytes),
            _age(now - one.oldest_write),
            _age(now - one.newest_write),
            _age(now - one.newest_use),
        )
        for one in model.namespaces
    ]
    return lines


def _shown(text: str) -> str:
    """Text that a client may have chosen, for a terminal: nothing in it moves the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
