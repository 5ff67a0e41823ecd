"""What capture costs a decode step: time between tokens with capture on against plain SGLang.

    python -m benchmark.restore.capture --shape llama-2-7b [--batches 1,8,32] [--cells FILE]
    python -m benchmark.restore.capture --shape llama-2-7b --rehearse

Engines with and without capture (`--hc-disable`) take turns, each in a process of its own, with
CUDA graphs where there is a GPU. A step's time is that between two iterations of the scheduler's
loop while all requests of the batch decode and nothing else happens. With --cells each engine's
times are kept as soon as they are measured.
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

from benchmark import ROOT
from benchmark.gpu.settings import SHAPES, make_shape, rehearsal
from benchmark.gpu.tables import pair_rows
from benchmark.harness import machine
from benchmark.harness.cases import answer, kept_case
from benchmark.harness.cells import CellFile
from benchmark.restore.goals import capture_lines

ELEMENT = 2
"""Bytes of an element of what is kept."""

SETTLING = 8
"""Steps at either end of a batch's decoding that are left out."""


def measure(case: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a step per batch size."""
    from benchmark.harness.core import Core

    largest = max(case["batches"])
    tokens = largest * (case["prompt"] + case["new"]) + 1024
    words = ["--max-total-tokens", str(tokens), "--max-running-requests", str(largest)]
    words += ["--hc-disable"] if case["arm"] == "off" else ["--hc-forms", case["forms"]]
    core = Core(
        *words, "--hc-host-size-gb", case["host_gb"],
        *shlex.split(case["server_args"]), model=case["folder"],
        SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE="0",
        SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="0",
    )  # fmt: skip
    rng = random.Random(1)
    found = {}
    for batch in (1, *case["batches"]):  # the first pays for everything that happens once
        times: list[float] = []

        def noted(_: int, times: list[float] = times) -> None:
            times.append(time.perf_counter())

        for _ in range(batch):
            core.submit([rng.randrange(3, 900) for _ in range(case["prompt"])], case["new"])
        core.run(each_pass=noted)
        last = len(times) - SETTLING
        steps = times[last - case["new"] + 2 * SETTLING : last]
        found[str(batch)] = statistics.median(b - a for a, b in pairwise(steps))
    if case["arm"] == "on":
        kept = core.tree.stats().get("kept_tokens", 0)
        assert kept, "capture kept nothing: this would measure no capture"
    return found


def host_gb(folder: Path, forms: str, tokens: int) -> float:
    """Host memory for every token that one engine sees, and a quarter more. Pinning more would only
    take longer."""
    config = json.loads((folder / "config.json").read_text())
    kv = 2 * config["num_key_value_heads"] / config["num_attention_heads"]
    widest = 1.0 if forms == "hidden" else max(1.0, kv)
    row: float = config["hidden_size"] * widest * config["num_hidden_layers"] * ELEMENT
    return max(1.0, 1.25 * tokens * row / (1 << 30))


def key(args: argparse.Namespace, repeat: int, arm: str) -> str:
    tiny = "tiny " if args.rehearse else ""
    return f"capture/{tiny}{args.shape}/{args.forms}/{args.batches}/repeat {repeat}/{arm}"


def run(file: CellFile, name: str, case: dict[str, Any]) -> dict[str, float] | None:
    """Times of one engine by batch, kept under a key; None when it failed."""
    about = {field: case[field] for field in ("shape", "arm", "repeat", "forms")}
    module = machine.module(__file__)
    found: dict[str, float] | None = kept_case(
        file, name, module, case, lambda steps: {**about, "step_s": steps}
    )
    if found is not None:
        steps = (f"batch {b} {1e3 * s:.3f} ms" for b, s in found.items())
        print(f"{name}: {', '.join(steps)}", flush=True)
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
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--server-args", default="", help="further SGLang flags")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where shapes go")
    parser.add_argument("--cells", type=Path, help="keep every engine's times in this file")
    parser.add_argument("--rehearse", action="store_true", help="tiny and short, for a CPU")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        answer(measure(json.loads(args.case)))
        return 0
    flags = f"--load-format dummy --dtype {args.dtype} {args.server_args}"
    if args.rehearse:
        args.batches, args.prompt, args.new = "1,2", 64, 40
        flags = f"{flags} {rehearsal(args.shape)}"
    folder = make_shape(args.shape, args.models).resolve()
    batches = [int(word) for word in args.batches.split(",")]
    tokens = (1 + sum(batches)) * (args.prompt + args.new)
    size = 1.0 if args.rehearse else host_gb(folder, args.forms, tokens)
    case = {
        "shape": args.shape,
        "folder": str(folder),
        "batches": batches,
        "forms": args.forms,
        "prompt": args.prompt,
        "new": args.new,
        "host_gb": f"{size:.3g}",
        "server_args": flags,
    }
    file = CellFile(args.cells, "capture")
    good, pairs = True, []
    for repeat in range(args.repeats):
        order = ("off", "on") if repeat % 2 == 0 else ("on", "off")
        todo = [arm for arm in order if not file.has(key(args, repeat, arm))]
        found = {
            arm: run(file, key(args, repeat, arm), {**case, "arm": arm, "repeat": repeat})
            for arm in todo
        }
        good &= None not in found.values()
        if len(found) == len(order) and None not in found.values():
            pairs.append({arm: times for arm, times in found.items() if times is not None})
    print("\n".join(capture_lines(pair_rows(pairs))))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
