"""A campaign of cheap steps, run as `python campaign_steps.py [flags of the campaign]` with the
root of the tree and `test` in PYTHONPATH.

Also the step itself: `campaign_steps.py step NAME COUNT --cells FILE` measures COUNT cells, slowly
enough to be killed between and inside them. NAME `fails` ends with status 3 after the first one,
`hangs` never ends, `loud` writes a lot.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

PAUSE_S = 0.03


def step(words: list[str]) -> int:
    from benchmark.harness.cells import CellFile

    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("count", type=int)
    parser.add_argument("--cells", type=Path)
    args = parser.parse_args(words)
    file = CellFile(args.cells, "fake")
    for number in range(args.count):
        key = f"fake/{args.name}/{number}"
        if file.has(key):
            continue
        time.sleep(PAUSE_S)
        file.add(key, {"number": number}, PAUSE_S)
        if args.name == "fails":
            print("the last words")
            return 3
    if args.name == "loud":
        sys.stdout.write("x" * (2 << 20))
    if args.name == "hangs":
        time.sleep(600)
    return 0


def steps(*kinds: tuple[str, int, float]) -> tuple[object, ...]:
    """Steps of (name, cells, expected minutes)."""
    from benchmark.gpu.runner import Step

    return tuple(
        Step(
            *(
                name,
                f"{count} cells",
                minutes,
                ("support.campaign_steps", "step", name, str(count)),
                (),
            ),
            rehearsal_minutes=minutes,
            takes_server_args=False,
        )
        for name, count, minutes in kinds
    )


if __name__ == "__main__":
    if sys.argv[1] == "step":
        sys.exit(step(sys.argv[2:]))
    from benchmark.gpu import campaign

    some = steps(("one", 4, 0.01), ("two", 3, 0.01), ("three", 5, 0.01))
    sys.exit(campaign.main(sys.argv[1:], some))
