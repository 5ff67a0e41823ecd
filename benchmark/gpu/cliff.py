"""Past the KV pool: stock SGLang, HiCache and sglang-hc with up to four times its conversations.

    python -m benchmark.gpu.cliff --shape llama-2-7b [flags of python -m benchmark cliff]

The pool holds 14 conversations of about 4,700 tokens, the host tier (64 GiB) all.
"""

from __future__ import annotations

import sys

from benchmark.gpu.settings import run

PRESET = [
    *("--arms", "stock,hicache,auto"),
    *("--max-total-tokens", "65536", "--host-size-gb", "64"),
    *("--system-len", "4096", "--turns", "5", "--input-len", "128", "--output-len", "64"),
    *("--window", "20", "--repeat", "2", "--servers", "turns"),
]
REHEARSAL = [
    *("--max-total-tokens", "512", "--host-size-gb", "1"),
    *("--system-len", "128", "--turns", "2", "--input-len", "16", "--output-len", "4"),
    *("--window", "2", "--repeat", "1"),
]

if __name__ == "__main__":
    sys.exit(run("cliff", PRESET, REHEARSAL, __doc__))
