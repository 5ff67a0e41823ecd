"""Chats that overflow the KV pool: stock SGLang, HiCache and sglang-hc on one GPU.

    python -m benchmark.gpu.multi_turn --shape llama-2-7b [flags of python -m benchmark multi-turn]

24 conversations of about 5,000 tokens arrive at 1 and at 4 a second; the KV pool holds 13 of them,
the host tier (64 GiB) all. Every turn after the first finds its history gone from the device unless
the next turn came soon.
"""

from __future__ import annotations

import sys

from benchmark.gpu.settings import run

PRESET = [
    *("--arms", "stock,hicache,auto"),
    *("--max-total-tokens", "65536", "--host-size-gb", "64"),
    *("--sessions", "24", "--turns", "5", "--system-len", "4096", "--input-len", "128"),
    *("--output-len", "64", "--think", "exponential:4", "--rates", "1,4"),
    *("--repeat", "2", "--servers", "turns", "--no-compare"),
]
REHEARSAL = [
    *("--max-total-tokens", "1024", "--host-size-gb", "1"),
    *("--sessions", "4", "--turns", "2", "--system-len", "384", "--input-len", "32"),
    *("--output-len", "4", "--think", "0", "--rates", "inf", "--max-parallel", "1"),
    *("--round-barrier", "--repeat", "1"),
]

if __name__ == "__main__":
    sys.exit(run("multi-turn", PRESET, REHEARSAL, __doc__))
