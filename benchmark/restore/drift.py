"""Restored K/V against the originals, per model family and dtype; with CUDA graphs, if there are.

    python -m benchmark.restore.drift [--models llama-mha,qwen3] [--dtypes bfloat16] [--cells FILE]

Several requests of different lengths run together, prompt and a reply of more than a block, so
that some blocks hold nothing but decoded rows, and batches are padded to the sizes of the graphs.
Their K/V are noted, everything is pushed off the device, and what comes back is compared row by
row, prompt and decoded rows apart. A tap that a replayed graph does not run leaves the states of
another step: such rows are off by the size of the values. KV form must be equal byte for byte.

Exit status 1: a difference above the rounding of one projection, nothing came back, or a case
failed; the others run all the same. With --cells each case is kept as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmark import ROOT
from benchmark.harness import machine
from benchmark.harness.cases import answer, run_case
from benchmark.harness.cells import CellFile

MODELS = "llama-mha,llama-gqa,mistral,qwen2,qwen3,gemma,phi,opt,gpt2,granite,starcoder2,deepseek-v2"
PROMPTS = (70, 131, 200)
NEW = 150
"""Tokens of a reply: the second block behind the shortest prompt has decoded rows only."""
POOL = 1600


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Largest differences of restored rows, relative to the largest value of the layer's part."""
    from benchmark.harness.core import Core

    core = Core(
        "--hc-forms", case["forms"], "--dtype", case["dtype"], "--max-total-tokens", str(POOL),
        "--hc-host-size-gb", "0.25", *shlex.split(case["server_args"]), model=case["model"],
    )  # fmt: skip
    from sglang_hc.srt.model.startup_checks import TOLERANCE

    rng = random.Random(3)
    prompts = [[rng.randrange(3, 900) for _ in range(length)] for length in PROMPTS]
    rids = [core.submit(prompt, NEW) for prompt in prompts]
    core.run()
    known = [p + core.reply(r).tokens[:-1] for p, r in zip(prompts, rids, strict=True)]
    core.settle()
    before = [core.kv(tokens) for tokens in known]
    core.flood(rng, 2 * POOL)
    core.settle()
    worst = {"prompt": 0.0, "decoded": 0.0}
    restored, equal = 0, True
    for tokens, prompt, old in zip(known, prompts, before, strict=True):
        restored += core.ask([*tokens, 5], 1).host
        new = core.kv(tokens)
        for original, back in zip(old, new, strict=True):
            assert original.shape == back.shape, "not all rows are on the device"
            a, b = original.float(), back.float()
            scale = float(a.abs().max()) or 1.0
            error = ((a - b).abs().flatten(1).amax(dim=1) / scale).tolist()
            worst["prompt"] = max(worst["prompt"], *error[: len(prompt)])
            worst["decoded"] = max(worst["decoded"], *error[len(prompt) :])
            equal &= max(error) == 0
    runner = core.scheduler.tp_worker.model_runner
    plan = str(core.tree.stats()["layer_plan"])
    limit = TOLERANCE[runner.dtype] if "hidden" in plan else 0.0
    graphs = runner.device == "cuda" and not runner.server_args.disable_cuda_graph
    return {
        **{name: case[name] for name in ("model", "dtype", "forms", "deterministic")},
        "layer_plan": plan,
        "cuda_graphs": graphs,
        "restored_tokens": restored,
        "worst_prompt_row": worst["prompt"],
        "worst_decoded_row": worst["decoded"],
        "bit_equal": equal,
        "limit": limit,
        "good": restored > 0 and max(worst.values()) <= limit,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--forms", default="hidden,kv")
    parser.add_argument(
        "--deterministic", action="store_true", help="under --enable-deterministic-inference"
    )
    parser.add_argument("--server-args", default="", help="further SGLang flags")
    parser.add_argument("--cells", type=Path, help="keep every case in this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        answer(measure(json.loads(args.case)))
        return 0
    from scripts.make_tiny_models import main as make_tiny_models

    if make_tiny_models(["--output", str(ROOT / "models"), "--only", args.models]):
        return 2
    flags = args.server_args + " --enable-deterministic-inference" * args.deterministic
    file = CellFile(args.cells, "drift")
    cases = [
        {"model": m, "dtype": d, "forms": f, "deterministic": args.deterministic}
        for m in args.models.split(",")
        for d in args.dtypes.split(",")
        for f in args.forms.split(",")
    ]
    todo = [case for case in cases if not file.has(key(case))]
    good = [run(file, case, flags) for case in todo]
    return 0 if all(good) else 1


def key(case: dict[str, Any]) -> str:
    how = "deterministic" if case["deterministic"] else "default"
    return f"drift/{case['model']}/{case['dtype']}/{case['forms']}/{how}"


def run(file: CellFile, case: dict[str, Any], flags: str) -> bool:
    """Measures and keeps one case. Returns whether it is good."""
    began = time.monotonic()
    try:
        row = run_case(machine.module(__file__), {**case, "server_args": flags})
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        file.failed(key(case), "the case failed", str(error), time.monotonic() - began)
        print(f"BAD {key(case)}: {error}", flush=True)
        return False
    file.add(key(case), row, time.monotonic() - began)
    print(
        f"{'ok ' if row['good'] else 'BAD'} {row['model']:12} {row['dtype']:9}"
        f" {row['layer_plan']:12} prompt rows {row['worst_prompt_row']:.1e}, decoded rows"
        f" {row['worst_decoded_row']:.1e}, {row['restored_tokens']} tokens",
        flush=True,
    )
    return bool(row["good"])


if __name__ == "__main__":
    sys.exit(main())
