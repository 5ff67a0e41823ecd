"""Blocks of a remote store whose round trips are long: one call at a time, and several.

The store is this process's memory behind a link: each call waits for a round trip and then for its
bytes, which share the link's bandwidth with those of other calls. Reads are verified, as in a
server. `one` and `several` are seconds for all blocks; the ratio is the first over the second. The
arms take turns; medians of the rounds.

    python -m benchmark.disk.round_trips --output result.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmark.disk.compare_fio import SLOTS, layout_of, make_blocks, model_of, seconds_of
from benchmark.harness import machine
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.remote import CALLS, Frames, RemoteStore

ROUND_TRIPS_MS = (0.2, 2.0, 20.0, 50.0)
LINK_GB_S = 1.25
"""10 Gbit/s."""


class Link:
    """When bytes that are asked for now have passed, behind those that were before."""

    def __init__(self, round_trip: float) -> None:
        self._round_trip = round_trip
        self._free = 0.0
        self._lock = threading.Lock()

    def wait(self, size: int) -> None:
        with self._lock:
            begin = max(self._free, time.monotonic() + self._round_trip)
            self._free = begin + size / (LINK_GB_S * 1e9)
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


class FarMemory:
    """RemoteBackend over a dictionary."""

    name = "FarMemory"

    def __init__(self, link: Link, frames: Frames) -> None:
        self._link, self._frames = link, frames
        self._values: dict[str, bytes] = {}

    def exists(self, keys: Sequence[str]) -> int:
        return 0

    def get(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        self._link.wait(len(keys) * self._frames.bytes.shape[1])
        for key, frame in zip(keys, frames, strict=True):
            self._frames.bytes[frame] = memoryview(self._values[key])
        return [True] * len(keys)

    def put(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        self._link.wait(len(keys) * self._frames.bytes.shape[1])
        for key, frame in zip(keys, frames, strict=True):
            self._values[key] = self._frames.bytes[frame].tobytes()
        return [True] * len(keys)

    def delete(self, keys: Sequence[str]) -> bool:
        return False

    def clear(self) -> None:
        self._values.clear()

    def close(self) -> None:
        """Nothing is open."""


def turn(round_trip: float, calls: int, kib: int, count: int) -> dict[str, float]:
    """Seconds that so many blocks take to be written, and read again."""
    layout = layout_of(kib)
    model, pool = model_of(layout), HostPool(layout, SLOTS)
    pool.bytes[:] = 7
    frames = Frames(model.header_bytes, model.block_bytes, calls)
    io = RemoteStore(FarMemory(Link(round_trip), frames), frames, pool, model, Counter())
    blocks, end = make_blocks(count, 1), time.monotonic() + 3600
    write = seconds_of(io, blocks, lambda ticket, block, slot: io.write(ticket, block, slot, end))
    read = seconds_of(
        io, blocks, lambda ticket, block, slot: io.read(ticket, block.block_id, slot, end)
    )
    io.close()
    return {"write": write, "read": read}


def compare(rounds: int, kib: int, count: int) -> list[dict[str, Any]]:
    rows = []
    for milliseconds in ROUND_TRIPS_MS:
        turns: dict[int, list[dict[str, float]]] = {1: [], CALLS: []}
        for _ in range(rounds):
            for calls, seen in turns.items():
                seen.append(turn(milliseconds / 1e3, calls, kib, count))
        row: dict[str, Any] = {"round_trip_ms": milliseconds, "block_kib": kib, "blocks": count}
        for kind in ("read", "write"):
            one, several = (statistics.median(t[kind] for t in seen) for seen in turns.values())
            row[kind] = {"one": one, "several": several, "ratio": one / several}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> dict[str, object]:
    """For `benchmark/make_tables.py`."""
    return {
        "columns": ["round trip", "read", "write"],
        "rows": [
            [f"{row['round_trip_ms']:g} ms", *(f"{row[k]['ratio']:.2f}" for k in ("read", "write"))]
            for row in rows
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kib", type=int, default=2048, help="of a block")
    parser.add_argument("--blocks", type=int, default=128)
    args = parser.parse_args()
    rows = compare(args.rounds, args.kib, args.blocks)
    if args.output:
        about = {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": machine.command(),
            "machine": machine.describe(),
        }
        result = {**about, "rows": rows, "tables": {"calls": table(rows)}}
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
