"""The demo of `make demo`: conversations that the KV pool forgets and sglang-hc remembers.

    python scripts/demo.py [further flags of `sglang-hc bench multi-turn`]

Eight conversations, each about a text of its own, take turns, five turns each, so that the KV pool
overflows between two turns of one conversation. Plain SGLang, then sglang-hc with KV form, then
with hidden form answer the same requests one after the other. Requests are sequential and the model
runs in float32, so that the replies of all three can be compared token by token.
"""

from __future__ import annotations

import sys

from sglang_hc.cli.main import main

SETTINGS = [
    *("--quick", "--arms", "stock,kv,hidden", "--servers", "turns"),
    *("--sessions", "8", "--turns", "5", "--system-len", "1024", "--input-len", "96"),
    *("--output-len", "16", "--max-total-tokens", "3072", "--host-size-gb", "2"),
    *("--output", "out/demo"),
]

if __name__ == "__main__":
    sys.exit(main(["bench", "multi-turn", *SETTINGS, *sys.argv[1:]]))
