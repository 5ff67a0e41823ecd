"""`python -m benchmark EXPERIMENT ...`: this package beside plain SGLang and HiCache.

`python -m benchmark EXPERIMENT --help` prints the flags of one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from sglang_hc.tools.cli.main import UsageError

EXPERIMENTS: dict[str, str] = {
    # name of a module here, with `-` for `_`, that has configure(parser) and run(args); its help
    "multi-turn": "chats whose history fell off the device: TTFT by turn, outputs compared",
    "long-context": "questions about long documents seen before, by Zipf skew from 0 to 2",
    "cliff": "more and more conversations at once: throughput past what the KV pool holds",
    "overhead": "no reuse at all: what the tier costs when it cannot help",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one experiment. Returns its exit status: 0 done, 1 found a problem, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m benchmark", description=__doc__)
    experiments = parser.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True)
    for name, text in EXPERIMENTS.items():
        chosen = importlib.import_module(f"benchmark.{name.replace('-', '_')}")
        experiment = experiments.add_parser(name, help=text, description=text)
        chosen.configure(experiment)
        experiment.set_defaults(run=chosen.run)
    args = parser.parse_args(words)
    try:
        return int(args.run(args))
    except UsageError as error:
        print(f"benchmark {args.experiment}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
