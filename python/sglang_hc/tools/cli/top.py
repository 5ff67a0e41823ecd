"""`sglang-hc top URL...`: a live view of the tiers of a server or a fleet."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_hc.tools.cli.main import UsageError, number
from sglang_hc.tools.scrape import SOURCES, Reading, Slow, scrape_all

CLEAR = "\x1b[H\x1b[2J"
"""Moves a terminal's cursor home and empties the screen."""

SLOWEST = 5
"""Restore passes that are shown."""

ROW = "{:<28} {:>9} {:>7}  {:>13} {:>8} {:>8}  {:>6} {:>6} {:>6} {:>6} {:>6}  {:>9} {:>7}".format
TITLES = ROW(
    *("server", "run/queue", "device", "host", "disk", "remote"),
    *("device", "host", "disk", "remote", "comp.", "restoring", "reading"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="of a server, such as http://127.0.0.1:30000"
    )
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each look")
    parser.add_argument(
        "--interval", default="2", metavar="SECONDS", help="between two looks; 0.2 to 3600"
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="has the key of servers with --api-key"
    )


def run(args: argparse.Namespace) -> int:
    """Look until interrupted, or once. Returns 1 if a server did not answer the last look."""
    for url in args.urls:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"{url!r}: give URLs that begin with http:// or https://")
    interval = number("--interval", args.interval, low=0.2, high=3600)
    key = _key(args.api_key_file)
    before: dict[str, Reading] = {}
    for look in itertools.count():
        if look:
            time.sleep(interval)
        readings = scrape_all(args.urls, key)
        if args.json:
            print(json.dumps({"servers": [one.to_dict() for one in readings]}), flush=True)
        else:
            start = CLEAR if sys.stdout.isatty() and not args.once else ""
            print(start + "\n".join(view(readings, before)), flush=True)
        if args.once:
            return int(any(one.error is not None for one in readings))
        before = {one.url: one for one in readings if one.error is None}
    raise AssertionError("looks do not end")


def view(readings: Sequence[Reading], before: Mapping[str, Reading]) -> list[str]:
    """Lines: a row for each server, what was decided, and the slowest restore passes of all.
    before: the look before this one, by URL; shares of prompts are of what came since, or of all
    since the start where that is nothing."""
    lines = [TITLES]
    for one in readings:
        lines.append(_row(one, before.get(one.url)))
        if one.note is not None:
            lines.append(f"    {_shown(one.note)}")
    lines += [*_decisions(readings), *_written(readings)]
    slow = [(one, slow) for one in readings for slow in one.slowest]
    slow.sort(key=lambda pair: pair[1].seconds, reverse=True)
    if slow:
        lines += ["", "slowest restorations of the last ten minutes"]
    lines += [_slow_line(one.url, slow) for one, slow in slow[:SLOWEST]]
    return lines


def _row(one: Reading, before: Reading | None) -> str:
    name = _shown(one.url.removeprefix("http://").removeprefix("https://").rstrip("/"))
    if len(name) > 28:
        name = f"{name[:27]}~"
    if one.error is not None:
        return f"{name:<28} does not answer: {_shown(one.error)}"
    have = one.numbers.get
    slots, free = have("host_slots", 0), have("host_free_slots", 0)
    host = f"{slots - free:.0f}/{slots:.0f}" if slots else "-"
    requests = "-" if one.running is None else f"{one.running}/{_or_dash(one.queued)}"
    usage = "-" if one.device_usage is None else f"{one.device_usage:.0%}"
    remote = _or_dash(have("remote_blocks"))
    if "remote_usable" in one.numbers:
        remote = "up" if one.numbers["remote_usable"] >= max(1, one.replicas) else "DOWN"
    return ROW(
        *(name, requests, usage, host, _or_dash(have("disk_blocks")), remote),
        *_shares(one, before),
        *(_or_dash(have("restorations_under_way")), _or_dash(have("fetches_under_way"))),
    )


def _shares(one: Reading, before: Reading | None) -> list[str]:
    """Of prompt tokens by source, but for those of aborted requests."""
    served = [source for source in SOURCES if source != "aborted"]
    tokens = [one.prompt_tokens.get(source, 0) for source in served]
    if before is not None:
        since = [n - before.prompt_tokens.get(s, 0) for n, s in zip(tokens, served, strict=True)]
        if sum(since) > 0 and min(since) >= 0:  # else nothing came, or the server began again
            tokens = since
    total = sum(tokens)
    return [f"{count / total:.0%}" if total else "-" for count in tokens]


def _decisions(readings: Sequence[Reading]) -> list[str]:
    decided, reasons = dict[str, int](), dict[str, int]()
    late = 0.0
    for one in readings:
        late += one.numbers.get("prefetch_late", 0)
        for into, found in ((decided, one.decisions), (reasons, one.reasons)):
            for name, count in found.items():
                into[name] = into.get(name, 0) + count
    if not decided:
        return []
    return [
        "",
        f"host hits   {_counted(decided)}",
        f"because     {_counted(reasons)}; the disk came too late for {late:.0f}",
    ]


def _written(readings: Sequence[Reading]) -> list[str]:
    """What the servers that have a disk write to it."""
    rates = [one.numbers.get("disk_bytes_per_day") for one in readings]
    known = [rate for rate in rates if rate is not None]
    return [f"to disk     {sum(known) / 1e9:.3g} GB a day since the start"] if known else []


def _slow_line(url: str, slow: Slow) -> str:
    expected = f"expected {1e3 * slow.expected_seconds:.1f}" if slow.expected_seconds else "-"
    return (
        f"{1e3 * slow.seconds:9.1f} ms  {expected:<16} {slow.tokens:>8} tokens  "
        f"{slow.age_s:4.0f} s ago  {_counted(slow.reasons)}  {_shown(url)}"
    )


def _counted(found: Mapping[str, int]) -> str:
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return ", ".join(f"{_shown(name)} {count}" for name, count in ordered) or "nothing"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _shown(text: str) -> str:
    """Text of a server, for a terminal: nothing in it moves the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:200]


def _key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {path}: {error}") from error
