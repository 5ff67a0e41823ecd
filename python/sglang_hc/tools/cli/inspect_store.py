"""`sglang-hc inspect DIR...`: what lies in the directories of the disk tier."""

from __future__ import annotations

import argparse
import time
from itertools import chain

import msgspec

from sglang_hc.store.disk.directory import DirectoryError
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.disk.summary import DirectorySummary, ModelSummary, stores_in, summarize


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
        stores = chain.from_iterable(map(stores_in, args.directories))
        summaries = [summarize(path) for path in stores]
    except DirectoryError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error}; run this as the user of the server") from error
    if args.json:
        print(msgspec.json.format(msgspec.json.encode({"directories": summaries})).decode())
        return 0
    for summary in summaries:
        print("\n".join(_lines(summary, time.time())))
    return 0


def _lines(summary: DirectorySummary, now: float) -> list[str]:
    state = f"in use by process {summary.used_by}" if summary.used_by else "not in use"
    lines = [
        f"{summary.path}: format {summary.format_version}, {state}",
        f"  files {_size(summary.file_bytes)}, {summary.slots_used} of {summary.slots} "
        "preallocated slots used",
    ]
    for model in summary.models:
        lines += _model_lines(model, now)
    if not summary.slots_used:
        lines.append("  no blocks")
    return lines


def _model_lines(model: ModelSummary, now: float) -> list[str]:
    lines = [
        f"  model {model.label} ({model.fingerprint}): {model.blocks} blocks, "
        f"{model.layers} stored layers, slots of {_size(model.slot_bytes)}, "
        f"opened {_age(now - model.opened)} ago"
    ]
    if not model.namespaces:
        return lines
    row = "    {:<24} {:>9} {:>10} {:>12} {:>12} {:>12} {:>9}".format
    lines.append(row("namespace", "blocks", "in slots", "oldest", "newest", "last use", "hits"))
    lines += [
        row(
            (one.namespace or "(none)")[:24],
            one.blocks,
            _size(one.slot_bytes),
            _age(now - one.oldest_write),
            _age(now - one.newest_write),
            _age(now - one.newest_access),
            one.hits,
        )
        for one in model.namespaces
    ]
    return lines


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
