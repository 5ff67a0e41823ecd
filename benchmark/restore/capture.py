"""What capture costs a decode step: time between tokens with capture on against plain SGLang.

    python benchmark/restore/capture.py --shape llama-2-7b [--batches 1,8,32] [--out FILE]
    python benchmark/restore/capture.py --shape llama-2-7b --rehearse

Engines with and without capture (`--hc-disable`) take turns, each in a process of its own, with
CUDA graphs where there is a GPU. A step's time is that between two iterations of the scheduler's
loop while all requests of the batch decode and nothing else happens.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from cases import answer, run_case
from engine import ROOT
from settings import REHEARSAL, SHAPES, make_shape

from sglang_hc.bench import machine

GOAL = 1.01
SETTLING = 8
"""Steps at either end of a batch's decoding that are left out."""


def measure(case: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a step per batch size."""
    from support.core import Core

    largest = max(case["batches"])
    tokens = largest * (case["prompt"] + case["new"]) + 1024
    words = ["--max-total-tokens", str(tokens), "--max-running-requests", str(largest)]
    words += ["--hc-disable"] if case["arm"] == "off" else ["--hc-forms", case["forms"]]
    core = Core(
        *words, "--hc-host-size-gb", case["host_gb"], *shlex.split(case["server_args"]),
        model=case["folder"], SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE="0",
        SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="0",
    )  # fmt: skip
    rng = random.Random(1)
    found = {}
    for batch in (1, *case["batches"]):  # the first pays for everything that happens once
        times: list[float] = []
        receive = core._receive

        def noted(receive: Any = receive, times: list[float] = times) -> Any:
            times.append(time.perf_counter())
            return receive()

        core.scheduler.request_receiver.recv_requests = noted
        for _ in range(batch):
            core.submit([rng.randrange(3, 900) for _ in range(case["prompt"])], case["new"])
        core.run()
        core.scheduler.request_receiver.recv_requests = receive
        last = len(times) - SETTLING
        steps = times[last - case["new"] + 2 * SETTLING : last]
        found[str(batch)] = statistics.median(b - a for a, b in pairwise(steps))
    if case["arm"] == "on":
        kept = core.tree.stats().get("kept_tokens", 0)
        assert kept, "capture kept nothing: this would measure no capture"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--forms", default="hidden")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of engines")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--host-size-gb", default="48")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--server-args", default="", help="further SGLang flags")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where shapes go")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--rehearse", action="store_true", help="two layers, short, for a CPU")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        answer(measure(json.loads(args.case)))
        return 0
    flags = f"--load-format dummy --dtype {args.dtype} {args.server_args}"
    if args.rehearse:
        args.batches, args.prompt, args.new = "1,2", 64, 60
        args.host_size_gb, flags = "1", f"{flags} {REHEARSAL}"
    case = {
        "folder": str(make_shape(args.shape, args.models).resolve()),
        "batches": [int(word) for word in args.batches.split(",")],
        "forms": args.forms,
        "prompt": args.prompt,
        "new": args.new,
        "host_gb": args.host_size_gb,
        "server_args": flags,
    }
    pairs = []
    for repeat in range(args.repeats):
        order = ("off", "on") if repeat % 2 == 0 else ("on", "off")
        pairs.append({arm: run_case(__file__, {**case, "arm": arm}) for arm in order})
    rows = []
    for batch in map(str, case["batches"]):
        on, off = (statistics.median(pair[arm][batch] for pair in pairs) for arm in ("on", "off"))
        ratios = [pair["on"][batch] / pair["off"][batch] for pair in pairs]
        ratio = statistics.median(ratios)
        rows.append(
            {"batch": int(batch), "on_s": on, "off_s": off, "ratio": ratio, "ratios": ratios}
        )
        verdict = "met" if ratio <= GOAL else "MISSED"
        print(
            f"{verdict}: batch {batch}, {1e3 * on:.3f} ms with capture, {1e3 * off:.3f} without,"
            f" {ratio:.4f} times (goal {GOAL:g})"
        )
    if args.out is not None:
        result = {
            "experiment": "capture",
            "command": shlex.join(["python", "benchmark/restore/capture.py", *sys.argv[1:]]),
            "machine": machine.describe(),
            "settings": case | {"shape": args.shape, "repeats": args.repeats},
            "rows": rows,
            "pairs": pairs,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
