"""`sglang-hc bench EXPERIMENT ...`: the benchmarks of the source tree (`python -m benchmark`)."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sglang_hc.tools.cli.main import UsageError

PACKAGE = Path(__file__).resolve().parents[2]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="EXPERIMENT ...",
        help="`cliff` and its flags, or one of the others; `--help` behind it prints its flags",
    )


def run(args: argparse.Namespace) -> int:
    """Become the benchmark. Raises UsageError without the source tree; does not return else."""
    root = source_tree(PACKAGE)
    places = [str(root / "python"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    os.execve(sys.executable, [sys.executable, "-m", "benchmark", *args.words], env)


def source_tree(package: Path) -> Path:
    """The tree of which a folder is the package. Raises UsageError for a package from a wheel."""
    root = package.parents[1]
    if not (root / "benchmark" / "__main__.py").is_file():
        raise UsageError(
            "EXPERIMENT: the benchmarks are not part of the package; install it from its source "
            "tree (make setup) and run it there"
        )
    return root
