"""`sglang-hc bench EXPERIMENT`: measure this package against plain SGLang and HiCache."""

from __future__ import annotations

import argparse
import importlib

EXPERIMENTS: dict[str, tuple[str, str]] = {
    # name: (module with configure(parser) and run(args) -> exit status, one-line help)
    "multi-turn": (
        "sglang_hc.tools.bench.multi_turn",
        "chats whose history fell off the device: TTFT by turn, outputs compared",
    ),
    "long-context": (
        "sglang_hc.tools.bench.long_context",
        "questions about long documents seen before, and reuse skew from uniform to Zipf 2",
    ),
    "overhead": (
        "sglang_hc.tools.bench.overhead",
        "no reuse at all: what the tier costs when it cannot help",
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand for every experiment."""
    experiments = parser.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True)
    for name, (module, text) in EXPERIMENTS.items():
        experiment = experiments.add_parser(name, help=text, description=text)
        chosen = importlib.import_module(module)
        chosen.configure(experiment)
        experiment.set_defaults(run_experiment=chosen.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen experiment."""
    return int(args.run_experiment(args))
