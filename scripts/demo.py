"""The demo of `make demo`: conversations that the KV pool forgets and sglang-hc remembers.

    python scripts/demo.py [further flags of `sglang-hc bench multi-turn`]

Six conversations, each about a text of its own, take turns, four turns each, so that the KV pool
overflows between two turns of one conversation. Plain SGLang, then sglang-hc with KV form, then
with hidden form answer the same requests one after the other. Requests are sequential and the model
runs in float32, so that the replies of all three can be compared token by token. What is printed
fits on one screen; report.html in the output folder has every table, plot and command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_hc.bench import multi_turn
from sglang_hc.bench.screen import one_screen
from sglang_hc.cli.main import UsageError

SETTINGS = [
    *("--quick", "--arms", "stock,kv,hidden", "--servers", "turns"),
    *("--sessions", "6", "--turns", "4", "--system-len", "960", "--input-len", "64"),
    *("--output-len", "12", "--max-total-tokens", "2560", "--host-size-gb", "2"),
    *("--output", "out/demo"),
]


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 done, 1 replies differ or a request failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    multi_turn.configure(parser)
    try:
        return multi_turn.run(parser.parse_args([*SETTINGS, *argv]), one_screen)
    except UsageError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
