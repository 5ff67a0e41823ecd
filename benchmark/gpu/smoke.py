"""The first thing to run on a GPU: does every arm start, restore, and say the same?

    python -m benchmark.gpu.smoke [--models llama-mha,llama-gqa,qwen3] [--dtype bfloat16]
        [--page-size 1] [--server-args FLAGS] [--output out/gpu-smoke]

Seeded models of a few MB are made on the spot. The reference is plain SGLang with a KV pool that
never overflows, so nothing is ever recomputed there: recomputed states differ by rounding from
those written during decoding. All other arms have a pool that holds two of six conversations; each
must bring state back from the host tier and say the same tokens, or differ where two tokens tie
within the rounding of the dtype. Requests are sequential. Runs on a CPU as well, without HiCache.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmark import ROOT
from benchmark.__main__ import main as benchmark
from benchmark.gpu.settings import HICACHE_PAGE
from benchmark.harness.cells import CellFile
from scripts.make_tiny_models import main as make_tiny_models

ARMS = "stock,hicache,kv,hidden,auto"
ROOMY = "stock=--max-total-tokens 16384"
WORK = [
    *("--max-total-tokens", "1024", "--host-size-gb", "1", "--servers", "turns", "--repeat", "1"),
    *("--sessions", "6", "--turns", "3", "--system-len", "384", "--input-len", "32"),
    *("--output-len", "24", "--round-barrier", "--max-parallel", "1"),
]


def main() -> int:
    """Returns the exit status: 0 when every model passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="llama-mha,llama-gqa,qwen3")
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--page-size", type=int, default=1, help="of every arm but HiCache (64)")
    parser.add_argument("--server-args", default="", help="further flags for every server")
    parser.add_argument("--output", type=Path, default=Path("out/gpu-smoke"))
    parser.add_argument("--cells", type=Path, help="append the verdict of each model to this file")
    args = parser.parse_args()
    file = CellFile(args.cells, "smoke")
    folder = ROOT / "models"
    if make_tiny_models(["--output", str(folder), "--only", args.models]):
        return 2
    flags = f"--dtype {args.dtype} --page-size {args.page_size} {args.server_args}".strip()
    problems = []
    for model in args.models.split(","):
        key = f"smoke/{model}/{args.dtype}/page {args.page_size}/{args.arms}"
        if file.has(key):
            continue
        output = args.output / model
        words = ["--model", str(folder / model), "--arms", args.arms, "--arm-args", ROOMY]
        if "hicache" in args.arms.split(","):
            words += ["--arm-args", f"hicache={HICACHE_PAGE}"]
        began = time.monotonic()
        status = benchmark(
            ["multi-turn", *words, *WORK, "--server-args", flags, "--output", str(output)]
        )
        seconds = time.monotonic() - began
        found = [f"{model}: the benchmark ended with status {status}"] if status else []
        if status != 2:
            found += [f"{model}: {line}" for line in without_restores(output / "result.json")]
            agreement = json.loads((output / "result.json").read_text())["agreement"]
            verdicts = {item["arm"]: item["verdict"] for item in agreement}
            file.add(key, {"model": model, "outputs": verdicts, "problems": found}, seconds)
        else:
            file.failed(key, found[0], "", seconds)
        problems += found
    print("\n".join(["", *(problems or ["every arm restored, and every answer is explained"])]))
    return 1 if problems else 0


def without_restores(path: Path) -> list[str]:
    """Arms that brought nothing back from the host tier: they measured recomputation."""
    result = json.loads(path.read_text())
    return [
        f"{run['arm']} brought nothing back from the host tier"
        for run in result["runs"]
        if run["arm"] != "stock" and not run["summary"]["hits"].get("host")
    ]


if __name__ == "__main__":
    sys.exit(main())
