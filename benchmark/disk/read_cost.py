"""What reading blocks costs: bytes per second, and processor time per byte, digests included.

For several sizes of a block the blocks of one path are read in three ways:
  single   one call for each block, by one thread
  runs     blocks that lie side by side in calls of up to 4 MiB, by one thread
  server   as the server reads: the threads of each directory take what waits (disk/threads.py)
`digest` is the floor: the same bytes are only hashed, in memory. Where fio is installed it reads as
much in calls of the same length, two under way and without digests, by three ways:
  fio psync             one call for each, as the store does
  fio io_uring          calls are queued
  fio io_uring, fixed   and the memory is registered once, so that no read pins its pages

    python -m benchmark.disk.read_cost --dir /mnt/ssd --out result.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from benchmark.disk.compare_fio import NO_UPKEEP, machine, make_blocks
from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import Block, DirectorySpec, DiskStore, StoredModel
from sglang_hc.store.disk.reader import RUN_BYTES, Read
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from sglang_hc.tools.bench.machine import command

KIB = (128, 512, 2048, 8192)
"""Sizes of a block."""


FIO = {
    "fio psync": ("--ioengine=psync", "--numjobs=2"),
    "fio io_uring": ("--ioengine=io_uring", "--iodepth=2"),
    "fio io_uring, fixed": ("--ioengine=io_uring", "--iodepth=2", "--fixedbufs"),
}


def layout_of(kib: int) -> BlockLayout:
    """Eight layers, as hidden states."""
    return BlockLayout(LayerPlan(0, 8, 0), StateShape(8, kib * 2, (1, 1), "uint8"))


def measured(size: int, work: Callable[[], None]) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"gb_s": round(size / wall / 1e9, 3), "cpu_s_per_gb": round(cpu / size * 1e9, 4)}


def read_single(store: DiskStore, pool: HostPool, blocks: Sequence[Block]) -> None:
    for slot, block in enumerate(blocks):
        expect_ok(store.read_many([Read(block.block_id, pool.view(slot))]))


def read_runs(store: DiskStore, pool: HostPool, blocks: Sequence[Block]) -> None:
    most = max(1, RUN_BYTES // store.slot_bytes)
    for first in range(0, len(blocks), most):
        some = range(first, min(first + most, len(blocks)))
        wanted = [Read(blocks[slot].block_id, pool.view(slot)) for slot in some]
        expect_ok(store.read_many(wanted))


def read_server(io: DiskThreads, blocks: Sequence[Block]) -> None:
    for slot, block in enumerate(blocks):
        io.read(slot, block.block_id, slot, time.monotonic() + 600)
    left = len(blocks)
    while left:
        done = io.poll()
        expect_ok([answer.outcome for answer in done])
        left -= len(done)
        time.sleep(0.001)


def digest_all(pool: HostPool) -> None:
    for slot in range(pool.num_slots):
        xxhash.xxh3_128_digest(pool.slot(slot).data)


def expect_ok(outcomes: Sequence[Outcome]) -> None:
    if any(outcome is not Outcome.OK for outcome in outcomes):
        raise RuntimeError(f"a block was not read: {outcomes}")


def fio(folder: Path, request: int, total: int, options: Sequence[str]) -> dict[str, float]:
    """Read a file of fio's, which stays for the next arm, without the page cache."""
    jobs = 2 if "--numjobs=2" in options else 1
    words = [
        "fio", "--name=blocks", f"--filename={folder / 'blocks'}", "--thread",
        "--rw=read", f"--bs={request}", f"--filesize={total}", f"--size={total // jobs}",
        f"--offset_increment={total // jobs}", "--direct=1", "--group_reporting",
        "--output-format=json", *options,
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    read = job["read"]["io_bytes"]
    return {
        "gb_s": round(job["read"]["bw_bytes"] / 1e9, 3),
        "cpu_s_per_gb": round(busy / read * 1e9, 4),
    }


def compare(root: Path, kib: int, total: int, rounds: int) -> list[dict[str, object]]:
    layout = layout_of(kib)
    count = total // layout.slot_bytes
    pool = HostPool(layout, count)
    pool.bytes[:] = 7
    blocks = make_blocks(count, kib)
    model = StoredModel.of(layout.chunks(), layout.fingerprint("cost"), "cost")
    spec = DirectorySpec(str(root / str(kib)), 4 * total + 100_000_000)
    store = DiskStore.open([spec], model, NO_UPKEEP)
    items = [(block, pool.view(slot)) for slot, block in enumerate(blocks)]
    expect_ok(store.write_many(items))
    io = DiskThreads(store, pool, Counter())
    arms: dict[str, Callable[[], None]] = {
        "single": lambda: read_single(store, pool, blocks),
        "runs": lambda: read_runs(store, pool, blocks),
        "server": lambda: read_server(io, blocks),
        "digest": lambda: digest_all(pool),
    }
    size = count * layout.slot_bytes
    rows: list[dict[str, object]] = []
    for turn in range(rounds):
        for name, work in arms.items():
            row = {"block_kib": kib, "arm": name, "round": turn, **measured(size, work)}
            rows.append(row)
            print(json.dumps(row), flush=True)
        for name, options in FIO.items() if shutil.which("fio") else ():
            request = min(layout.slot_bytes, RUN_BYTES)
            speed = fio(root, request, total // (2 * request) * 2 * request, options)
            rows.append({"block_kib": kib, "arm": name, "round": turn, **speed})
            print(json.dumps(rows[-1]), flush=True)
    io.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="a directory on the file system to measure")
    parser.add_argument("--out", help="write the results to this JSON file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=512, help="per arm and round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="hc-read-cost-") as folder:
        root = Path(folder)
        result: dict[str, object] = {"command": command(), "machine": machine(root)}
        total = args.megabytes << 20
        result["rows"] = [row for kib in KIB for row in compare(root, kib, total, args.rounds)]
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
