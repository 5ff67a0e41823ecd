"""What conversations compute again where paths are continued at ends alone, and what the ends take.

    python -m benchmark.ends.run [--out benchmark/results/cpu-ends.json]

Eight conversations of ten turns with up to three calls of tools each, all told the same 1,000
tokens first, take turns at random on one host tier (`chats.py`). Nothing is computed: the policies
are the server's own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmark.ends.chats import Places, grid, ours, talk
from benchmark.ends.models import MODELS
from benchmark.harness import machine
from sglang_hc.tools.model_ends import KeptShape, kept_shape

ARMS: dict[str, tuple[Places, int | None]] = {
    "ends, room for all": (ours, None),
    "ends, room for 4": (ours, 4),
    "grid of 256": (grid(256), None),
    "grid of 256, room for 4": (grid(256), 4),
    "grid of 2,048": (grid(2048), None),
    "every block": (grid(64), None),
}
SHOWN = ("gpt-oss 20B", "Qwen3-Next 80B-A3B")
COLUMNS = ("where ends are", "most again", "mean again", *(f"{name}, MB" for name in SHOWN))


def rows(*, thinks: bool) -> list[list[str]]:
    """Of each arm: tokens computed again by a request that came back, and bytes of the ends of a
    conversation when all are over."""
    found = []
    for name, (places, room) in ARMS.items():
        talks = [talk(_shape(model).ends, places, room, thinks=thinks) for model in SHOWN]
        again = talks[0].again
        size = (f"{one.end_bytes / 1e6:,.0f}" for one in talks)
        found.append([name, f"{max(again):,}", f"{mean(again):.0f}", *size])
    return found


def _shape(model: str) -> KeptShape:
    shape = kept_shape(MODELS[model])
    assert shape is not None
    return shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmark/results/cpu-ends.json"))
    args = parser.parse_args()
    tables = {
        name: {"columns": COLUMNS, "rows": rows(thinks=thinks)}
        for name, thinks in (("plain", False), ("thinks", True))
    }
    result: dict[str, Any] = {**machine.about("ends"), "tables": tables}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
