"""A profile measured on a busy machine, and what becomes of it on an idle one.

The first start happens beside busy loops and caches its profile. The loops end; the second start
finds the cache, 20 histories of 800 tokens are served, leave the device, and are asked for again.
Printed: for each history the tokens restored and the time to the first token, and what was learned.

    python -m benchmark.restore.busy_start --model demo
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from typing import Any

from support.core import Core, run_in_child

LENGTH = 800


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--model", default="demo", help="a folder of models/")
    options.add_argument("--form", default="kv", choices=("kv", "hidden", "auto"))
    options.add_argument("--loops", type=int, default=6, help="busy loops beside the first start")
    options.add_argument("--histories", type=int, default=20)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        loops = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(args.loops)]
        for loop in loops:
            loop.start()
        try:
            run_in_child(_start, args.model, args.form)
        finally:
            for loop in loops:
                loop.kill()
                loop.join()
        served = run_in_child(_serve, args.model, args.form, args.histories)
        print(json.dumps(served, indent=2))


def _spin() -> None:
    while True:
        pass


def _engine(model: str, form: str) -> Core:
    return Core(
        "--hc-forms", form, "--hc-host-size-gb", "3", "--max-total-tokens", "2048",
        "--dtype", "float32", "--log-level", "warning", model=model, profile=None,
    )  # fmt: skip


def _start(model: str, form: str) -> None:
    _engine(model, form)


def _serve(model: str, form: str, count: int) -> dict[str, Any]:
    core = _engine(model, form)
    rng = random.Random(5)
    histories = [[rng.randrange(3, 900) for _ in range(LENGTH)] for _ in range(count)]
    for history in histories:
        core.ask(history, 1)
    core.settle()
    restored, milliseconds = [], []
    for history in histories:
        began = time.perf_counter()
        restored.append(core.ask([*history, 7, 8, 9], 1).host)
        milliseconds.append(round((time.perf_counter() - began) * 1e3, 1))
    core.settle()
    stats = core.tree.stats()
    half = count // 2
    return {
        "tokens restored": restored,
        "ms to the first token": milliseconds,
        "median of the first half": statistics.median(milliseconds[:half]),
        "median of the second half": statistics.median(milliseconds[half:]),
        "stats": {k: v for k, v in stats.items() if k.startswith(("cost_", "restore_"))},
    }


if __name__ == "__main__":
    main()
