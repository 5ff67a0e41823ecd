"""`sglang-hc COMMAND ...`: every tool beside the server, one module per command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS: dict[str, tuple[str, str]] = {
    # name: (module with configure(parser) and run(args) -> exit status, one-line help)
    "plan": ("sglang_hc.tools.cli.plan", "layer plan and restore times for a model and hardware"),
    "profile": (
        "sglang_hc.tools.cli.profile",
        "measure this machine for a model, for --hc-profile",
    ),
    "bench": ("sglang_hc.tools.cli.bench", "benchmarks against plain SGLang and HiCache"),
    "simulate": ("sglang_hc.tools.cli.simulate", "hit rates of a load on tiers of given sizes"),
    "replay": (
        "sglang_hc.tools.cli.replay",
        "a server's recorded run again: the same hits, evictions?",
    ),
    "inspect": (
        "sglang_hc.tools.cli.inspect_store",
        "what lies in the directories of the disk tier",
    ),
    "fsck": ("sglang_hc.tools.cli.fsck", "verify, and with --repair mend, the disk tier at rest"),
    "capacity": ("sglang_hc.tools.cli.capacity", "DRAM and SSD that a load needs for a hit rate"),
}


class UsageError(Exception):
    """A mistake of the user. The message names the option and the remedy; exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 0 done, 1 found a problem, 2 wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="sglang-hc", description=__doc__)
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
    except UsageError as error:
        print(f"sglang-hc {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    # Not this module's own main: commands raise the UsageError of the imported one.
    from sglang_hc.tools.cli.main import main as imported_main

    sys.exit(imported_main())
