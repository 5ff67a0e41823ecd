"""Time to the first token of the turn after a cut: moved state against recomputed truncation.

    python -m benchmark.quality.after_cut [--quick] [--out FILE]

Two servers of a real model (scripts/get_real_model.py) with a window of 2,048 tokens, one with
`--hc-overflow recompute` and one with `reembed`, are up together and asked in turns, in another
order in each round. A conversation has filled the window but for 148 tokens. Its next turn is over
the limit, so the half behind the head is dropped. What is kept is prefilled by the one server and
moves to its new places on the other. Medians over the rounds, after one that does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmark import ROOT
from benchmark.harness import machine
from benchmark.harness.server import ServerProcess

MODEL = "smollm2-135m"
MODES = ("recompute", "reembed")
WINDOW, RESERVE = 2048, 128
FIRST, ADDED, REPLY = 1900, 64, 8
"""Tokens of the first turn, of what the second adds, and of the first answer."""

PAUSE_S = 1.5
"""Between the turns: what the first has computed gets into its slots meanwhile."""

FLAGS = (
    # SGLang keeps two tokens of the context for itself.
    *("--context-length", str(WINDOW + 2), "--max-total-tokens", "8192", "--skip-server-warmup"),
    *("--hc-forms", "kv", "--hc-host-size-gb", "1", "--hc-overflow-reserve", str(RESERVE)),
    *("--enable-cache-report",),
)


def ask(server: ServerProcess, tokens: list[int], key: str, new: int) -> tuple[float, Any]:
    """Seconds until the answer of `new` tokens is there, and the answer."""
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": tokens, "extra_key": key, "sampling_params": sampling}
    request = urllib.request.Request(
        f"{server.url}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer = json.load(reply)
    return time.perf_counter() - begun, answer


def rounds(servers: dict[str, ServerProcess], text: list[int], count: int) -> list[dict[str, Any]]:
    """One row per server and round; the first round warms up."""
    rows = []
    for number in range(count + 1):
        start = number * (len(text) - FIRST - ADDED) // (count + 1)
        asked = text[start : start + FIRST + ADDED]
        order = MODES if number % 2 else MODES[::-1]
        histories = {}
        for mode in order:
            _, answer = ask(servers[mode], asked[:FIRST], f"{number}", REPLY)
            histories[mode] = asked[:FIRST] + answer["output_ids"] + asked[FIRST:]
        time.sleep(PAUSE_S)
        for mode in order:
            seconds, answer = ask(servers[mode], histories[mode], f"{number}", 1)
            said = answer["meta_info"]
            assert said["hc_overflow"]["mode"] == mode
            if number:
                row = {"round": number, "mode": mode, "ttft_s": round(seconds, 4)}
                row |= {"prompt_tokens": said["prompt_tokens"]}
                rows.append(row | {"cached_tokens": said["cached_tokens"]})
                print(json.dumps(row), flush=True)
    return rows


def tables(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of the README: medians and their ratio."""
    of = {mode: [row for row in rows if row["mode"] == mode] for mode in MODES}
    median = {mode: statistics.median(row["ttft_s"] for row in of[mode]) for mode in MODES}
    lines = []
    for mode in MODES:
        times = [row["ttft_s"] for row in of[mode]]
        found = statistics.median(row["cached_tokens"] for row in of[mode])
        length = statistics.median(row["prompt_tokens"] for row in of[mode])
        lines.append(
            [
                *(mode, str(len(times)), f"{found:.0f} of {length:.0f}"),
                *(f"{1e3 * median[mode]:.0f} ms", f"{1e3 * min(times):.0f} ms"),
                *(f"{1e3 * max(times):.0f} ms", f"{median['recompute'] / median[mode]:.2f}"),
            ]
        )
    columns = ["--hc-overflow", "turns", "tokens found", "TTFT", "least", "most", "times better"]
    return {"after-cut": {"columns": columns, "rows": lines}}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds instead of 7")
    parser.add_argument("--threads", type=int, default=2, help="of each server (default: 2)")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    script = [sys.executable, str(ROOT / "scripts" / "get_real_model.py")]
    if subprocess.run([*script, "--output", str(ROOT / "models")], check=False).returncode:
        return 2
    from benchmark.quality.real_text import tokens_of

    text = tokens_of(MODEL, "constitution.txt")
    env = {"OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(ROOT / "python")}
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryDirectory())
        servers = {}
        for mode in MODES:
            argv = ("--model-path", str(ROOT / "models" / MODEL), "--hc-overflow", mode, *FLAGS)
            log = Path(logs) / f"{mode}.log"
            server = ServerProcess("sglang_hc.launch_server", argv, env, log)
            servers[mode] = stack.enter_context(server)
        rows = rounds(servers, text, 2 if args.quick else 7)
    made = tables(rows)
    for line in made["after-cut"]["rows"]:
        print("  ".join(line))
    if args.out is not None:
        result = {
            **machine.about("after a cut"),
            "seconds": round(time.monotonic() - begun),
            "model": MODEL,
            "settings": {"window": WINDOW, "flags": FLAGS, "threads": args.threads},
            "rows": rows,
            "tables": made,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
