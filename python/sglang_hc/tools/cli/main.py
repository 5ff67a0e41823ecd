"""`sglang-hc COMMAND ...`: the tools beside the server, one module for each command."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import sglang_hc
from sglang_hc.errors import ConfigError

COMMANDS: dict[str, tuple[str, str]] = {
    # name: (module with configure(parser) and run(args) -> exit status, one-line help)
    "plan": (
        "sglang_hc.tools.cli.plan",
        "choose a layer plan and model its restore times, without the hardware",
    ),
    "profile": (
        "sglang_hc.tools.cli.profile",
        "measure this machine for a model; --hc-profile takes the result",
    ),
    "simulate": (
        "sglang_hc.tools.cli.simulate",
        "say what tiers of given sizes hit under a load",
    ),
    "capacity": (
        "sglang_hc.tools.cli.capacity",
        "find the DRAM and SSD that a load needs for a hit rate",
    ),
    "calibrate": (
        "sglang_hc.tools.cli.calibrate",
        "compare simulated times with those that a server recorded",
    ),
    "bench": (
        "sglang_hc.tools.cli.bench",
        "compare servers: `bench cliff` for more conversations than fit, and others",
    ),
    "top": (
        "sglang_hc.tools.cli.top",
        "show what servers do with their tiers, live",
    ),
    "inspect": (
        "sglang_hc.tools.cli.inspect_store",
        "list what lies in the directories of the disk tier",
    ),
    "fsck": (
        "sglang_hc.tools.cli.fsck",
        "verify the disk tier of a stopped server; --repair mends it",
    ),
}


class UsageError(ConfigError):
    """A mistake of the user. The message names the option and the remedy; exit status 2."""


@contextmanager
def blaming(options: str) -> Iterator[None]:
    """What goes wrong in here is a mistake in these options: it becomes a UsageError."""
    try:
        yield
    except (ConfigError, OSError) as error:
        raise UsageError(f"{options}: {error}") from error


def number(option: str, text: str, low: float = 0.0, high: float = 1e9) -> float:
    """A number within bounds. Raises UsageError that names the option."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise UsageError(f"{option} {text!r}: give a number from {low:g} to {high:g}")
    return value


def count(option: str, text: str, low: int = 1, high: int = 10_000_000) -> int:
    """A whole number within bounds. Raises UsageError that names the option."""
    short = text.isascii() and text.isdigit() and len(text) <= 20
    if not short or not low <= int(text) <= high:
        raise UsageError(f"{option} {text!r}: give a whole number from {low} to {high}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 0 done, 1 found a problem, 2 wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="sglang-hc", description="Tools beside the server.")
    parser.add_argument("--version", action="version", version=f"sglang-hc {sglang_hc.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if words[:1] == [name]:  # import only the command that runs: start stays fast
            chosen = importlib.import_module(module)
            chosen.configure(command)
            command.set_defaults(run=chosen.run)
    args = parser.parse_args(words)
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"sglang-hc {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    # Not this module's own main: commands raise the UsageError of the imported one.
    from sglang_hc.tools.cli.main import main as imported_main

    sys.exit(imported_main())
