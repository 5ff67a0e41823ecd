"""The demos: conversations that the KV pool forgets and sglang-hc remembers.

    python -m benchmark.demo talk    (make demo)
    python -m benchmark.demo forms   (make demo-forms)

Further flags are those of `python -m benchmark multi-turn`.

`talk`: a real model, SmolLM2-135M-Instruct, is asked about five documents, three questions each.
Plain SGLang answers, then sglang-hc with its defaults. `forms`: six conversations of four turns
with a model of random weights and multi-head attention; plain SGLang, KV form, hidden form.

In both, conversations take turns, so that the KV pool overflows between two turns of any of them.
Requests are sequential and the model runs in float32, so that replies can be compared token by
token. What is printed fits on one screen; report.html in the output folder has every table, plot
and command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from benchmark import multi_turn
from benchmark.harness.screen import one_screen
from sglang_hc.tools.cli.main import UsageError

SETTINGS = {
    "talk": [
        *("--quick", "--arms", "stock,sglang-hc", "--servers", "turns", "--warmup", "1"),
        *("--model", "models/smollm2-135m", "--max-total-tokens", "2560"),
        *("--dataset", "documents:benchmark/texts/conversations.json", "--output", "out/demo"),
    ],
    "forms": [
        *("--quick", "--arms", "stock,kv,hidden", "--servers", "turns"),
        *("--sessions", "6", "--turns", "4", "--system-len", "960", "--input-len", "64"),
        *("--output-len", "12", "--max-total-tokens", "2560", "--host-size-gb", "2"),
        *("--model", "models/demo", "--output", "out/demo-forms"),
    ],
}


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 done, 1 replies differ or a request failed, 2 wrong usage."""
    if not argv or argv[0] not in SETTINGS:
        print(f"demo: give one of {', '.join(SETTINGS)} first", file=sys.stderr)
        return 2
    # Several processes share few cores: threads that wait for one another make all of them slow.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    multi_turn.configure(parser)
    try:
        return multi_turn.run(parser.parse_args([*SETTINGS[argv[0]], *argv[1:]]), one_screen)
    except UsageError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
