"""What the I/O process costs the scheduler thread, and how fast it is there.

    PYTHONPATH=python python benchmark/disk/io_process.py --dir /mnt/ssd --out result.json

Workloads:
  operations  time on the caller's thread per operation, with `--hc-io thread` and `process`, arms
              interleaved; while nothing else happens, and while 4 reads are always under way
  start       an index of a million synthetic rows: ready, first hit, memory, back after SIGKILL,
              and the longest single poll on the way
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare_fio import LAYOUT, add_rows, machine, percentiles

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.block_io import Outcome
from sglang_hc.store.disk import Block, DirectorySpec
from sglang_hc.store.disk.format import Chunk, Striping
from sglang_hc.store.executor import CopyRows, FileRows, RowSpan
from sglang_hc.store.host_memory import MemorySpec
from sglang_hc.store.io_messages import DiskSpec
from sglang_hc.store.open_io import Io, open_io
from sglang_hc.tree.identity import block_id, pack_tokens, root_id

SLOTS = 128
FINGERPRINT = bytes(16)
SPANS = tuple(RowSpan(row, row, 0, 1) for row in range(16))
"""One decode step of 16 requests."""


def make_path(count: int) -> list[Block]:
    """Blocks of one prefix."""
    parent = root_id(FINGERPRINT, None)
    blocks = []
    for position in range(count):
        tokens = pack_tokens([position] * BLOCK_TOKENS)
        name = block_id(FINGERPRINT, parent, tokens)
        blocks.append(Block(name, parent, "", position, tokens))
        parent = name
    return blocks


def far() -> float:
    return time.monotonic() + 60


def drain(io: Io, count: int) -> list[Any]:
    done: list[Any] = []
    while len(done) < count:
        done += io.blocks.poll()
        time.sleep(0.0002)
    return done


class Timer:
    """Times calls one by one, with a pause now and then as a scheduler makes them."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    def __call__(self, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        self.samples.append(time.perf_counter() - started)


def operations(kind: str, folder: Path, busy: bool) -> dict[str, dict[str, float]]:
    memory = MemorySpec(LAYOUT, SLOTS, BLOCK_TOKENS, 2, 0)
    disk = DiskSpec((DirectorySpec(str(folder), 3_000_000_000),), FINGERPRINT, "benchmark", 0)
    io = open_io(kind, memory, disk)
    blocks = make_path(64)
    names = [block.block_id for block in blocks]
    timers: dict[str, Timer] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        timers.setdefault(name, Timer())(call)

    for slot, block in enumerate(blocks):
        timed("write", lambda slot=slot, block=block: io.blocks.write(block, slot, far()))
    drain(io, len(blocks))
    under_way = 0
    for turn in range(1500):
        while busy and under_way < 4:
            slot = 64 + turn % 32
            timed("read", lambda slot=slot: io.blocks.read(names[slot % 64], slot, far()))
            under_way += 1
        timed("contains_16", lambda: io.blocks.contains(names[:16]))
        timed("touch_16", lambda: io.blocks.touch(names[:16]))
        timed("file_16_rows", lambda: io.executor.submit(FileRows(0, SPANS)))
        timed("copy_rows", lambda: io.executor.submit(CopyRows(96, 97, 1)))
        timed("poll_executor", io.executor.poll)
        answers: list[Any] = []
        timed("poll_blocks", lambda answers=answers: answers.extend(io.blocks.poll()))
        under_way -= len(answers)
        time.sleep(0.0005)
    if not busy:
        for turn in range(500):
            timed("read", lambda turn=turn: io.blocks.read(names[turn % 64], 64, far()))
            drain(io, 1)
    drain(io, under_way)
    io.executor.drain()
    io.blocks.close()
    io.executor.close()
    return {name: percentiles(timer.samples) for name, timer in sorted(timers.items())}


def resident_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


def start(folder: Path, rows: int) -> dict[str, object]:
    small = BlockLayout(LayerPlan(0, 4, 0), StateShape(4, 512, (512, 512), "bfloat16"))
    memory = MemorySpec(small, 16, BLOCK_TOKENS, 1, 0)
    disk = DiskSpec((DirectorySpec(str(folder), 400_000_000_000),), FINGERPRINT, "start", 0)
    block = make_path(1)[0]
    io = open_io("process", memory, disk)
    io.blocks.write(block, 0, far())
    drain(io, 1)
    io.blocks.close()
    io.executor.close()
    slot_bytes = Striping(tuple(Chunk(*c) for c in small.chunks()), 1).slot_bytes
    add_rows(folder / "sglang-hc" / "index.sqlite", rows - 1, slot_bytes)

    before = resident_mb(os.getpid())
    started = time.perf_counter()
    io = open_io("process", memory, disk)
    ready = time.perf_counter() - started
    assert io.blocks.contains([block.block_id]) == 1
    io.blocks.read(block.block_id, 1, far())
    assert drain(io, 1)[0].outcome is Outcome.OK
    hit = time.perf_counter() - started
    pid = io.executor._supervisor.pid
    sizes = {
        "process_mb": resident_mb(pid),
        "mirror_mb": resident_mb(os.getpid()) - before,
        "blocks": io.blocks.levels()["disk_blocks"],
    }
    os.kill(pid, signal.SIGKILL)
    started = time.perf_counter()
    polls = []
    while io.executor.counts()["io_restarts"] == 0:
        begun = time.perf_counter()
        io.blocks.poll()
        polls.append(time.perf_counter() - begun)
        time.sleep(0.0005)
    back = time.perf_counter() - started
    io.blocks.close()
    io.executor.close()
    return {
        "rows": rows,
        "ready_s": round(ready, 3),
        "first_hit_s": round(hit, 3),
        **sizes,
        "back_after_sigkill_s": round(back, 3),
        "longest_poll_ms": round(1e3 * max(polls), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="a directory on the file system to use")
    parser.add_argument("--out", help="write the results to this JSON file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="hc-io-bench-") as folder:
        root = Path(folder)
        result: dict[str, object] = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(root),
        }
        for busy in (False, True):
            rounds = [
                {
                    kind: operations(kind, root / f"{kind}-{busy}-{number}", busy)
                    for kind in ("thread", "process")
                }
                for number in range(args.rounds)
            ]
            result["reads_under_way" if busy else "idle"] = rounds
        result["start"] = [start(root / f"start-{n}", args.rows) for n in range(args.rounds)]
    print(json.dumps(result, indent=2))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
