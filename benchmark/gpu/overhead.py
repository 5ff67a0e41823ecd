"""Nothing is ever reused: what capture costs on a GPU.

python -m benchmark.gpu.overhead --shape llama-2-7b [flags of python -m benchmark overhead]
"""

from __future__ import annotations

import sys

from benchmark.gpu.settings import run

PRESET = [
    *("--arms", "stock,hicache,auto"),
    *("--max-total-tokens", "131072", "--host-size-gb", "64"),
    *("--decode-heavy", "128:256", "--prefill-heavy", "2048:8", "--batches", "1,16,64"),
    *("--requests", "4", "--repeat", "3", "--servers", "turns", "--no-compare"),
]
REHEARSAL = [
    *("--max-total-tokens", "2048", "--host-size-gb", "1"),
    *("--decode-heavy", "16:8", "--prefill-heavy", "128:2", "--batches", "1,2"),
    *("--requests", "1", "--repeat", "1"),
]

if __name__ == "__main__":
    sys.exit(run("overhead", PRESET, REHEARSAL, __doc__))
