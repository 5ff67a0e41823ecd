"""The disk store against fio on the same file system in the same run, and its other costs.

Named workloads (all by default, or `--only NAME`):
  write      blocks into a new directory, slabs preallocated on the way; fio: a new file
  rewrite    blocks into slots that were used before; fio: over the same file
  read       the blocks in the order they were written, verified; fio: the same file
  scheduler  microseconds on the calling thread of contains, touch and drain_removed
  restart    time from opening an index of a million synthetic rows to the first verified read

What is matched is the queue depth: the requests under way in each directory. fio runs psync with
O_DIRECT and that many jobs for each directory; under the store lies a backend that lets no more
than that many through. Requests are equally long, and both sync after as many of them. The store is
called by one thread more for each directory, for the same reason that makes a server run several:
while one hashes, commits or is in Python, the next request is there already.
`store_under_way` and `fio_under_way` tell how many requests each directory had on average over the
time: what is missing to the depth is time in which the disk waited. The arms take turns; ratios are
medians over the rounds. Needs fio: apt-get install fio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmark.disk.lanes import Lanes
from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import Block, DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.backend import DirectBackend, aligned_buffer
from sglang_hc.store.disk.reader import Read
from sglang_hc.store.host_memory import HostMemory, MemorySpec, memory_file, page_setting
from sglang_hc.store.outcome import Outcome
from sglang_hc.tools.bench.machine import command

WORKLOADS = ("write", "rewrite", "read", "scheduler", "restart")
BATCH = 32
LAYOUT = BlockLayout(LayerPlan(0, 32, 0), StateShape(32, 1024, (1024, 1024), "bfloat16"))
"""32 chunks of 64 KiB: blocks of 2 MiB, as of a small model kept as hidden states."""
FINGERPRINT = LAYOUT.fingerprint("benchmark")
NO_UPKEEP = Upkeep(background=False, scrub_bytes_per_s=0)


def slot_bytes(layout: BlockLayout) -> int:
    """Size of a slot on disk, which is what one request reads or writes."""
    return StoredModel.of(layout.chunks(), bytes(16), "").slot_bytes


def make_blocks(count: int, seed: int) -> list[Block]:
    """Blocks with random identities; the bytes on disk do not depend on them."""
    root = seed.to_bytes(8, "big")
    names = [root + number.to_bytes(8, "big") for number in range(count)]
    return [Block(name, names[0], "", i, bytes(256)) for i, name in enumerate(names)]


def open_store(
    folders: Sequence[Path], size: int, backend: DirectBackend | None = None
) -> DiskStore:
    specs = [DirectorySpec(str(folder), size) for folder in folders]
    model = StoredModel.of(LAYOUT.chunks(), FINGERPRINT, "benchmark")
    return DiskStore.open(specs, model, NO_UPKEEP, backend)


def in_threads(threads: int, work: Callable[[int], None]) -> float:
    """Seconds until each thread has done its part."""
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        for done in [pool.submit(work, number) for number in range(threads)]:
            done.result()
        return time.perf_counter() - started


def slots(count: int) -> list[memoryview]:
    """Slots of a host tier as a server with an I/O process has them."""
    spec = MemorySpec(LAYOUT, count, 0, 0)
    descriptor = memory_file(spec)
    pool = HostMemory(spec, descriptor).pool
    os.close(descriptor)
    return [pool.view(number) for number in range(count)]


def write_all(store: DiskStore, blocks: Sequence[Block], threads: int) -> float:
    buffers = slots(threads)
    for buffer in buffers:
        buffer[:] = os.urandom(len(buffer))
    batches = deque(blocks[start : start + BATCH] for start in range(0, len(blocks), BATCH))

    def work(number: int) -> None:
        with suppress(IndexError):
            while True:
                batch = [(block, buffers[number]) for block in batches.popleft()]
                if set(store.write_many(batch)) != {Outcome.OK}:
                    raise RuntimeError("a block was not written")

    return in_threads(threads, work)


def read(store: DiskStore, block: Block, into: memoryview) -> Outcome:
    return store.read_many([Read(block.block_id, into)])[0]


def read_all(store: DiskStore, blocks: Sequence[Block], threads: int) -> float:
    buffers = slots(threads)
    left = deque(blocks)

    def work(number: int) -> None:
        with suppress(IndexError):
            while True:
                if read(store, left.popleft(), buffers[number]) is not Outcome.OK:
                    raise RuntimeError("a block was not read")

    return in_threads(threads, work)


class Speed(NamedTuple):
    """Bytes per second, and the requests under way in each directory on average over the time."""

    bytes_per_s: float
    depth: float


def fio(folders: Sequence[Path], kind: str, jobs: int, request: int, total: int) -> Speed:
    """Runs fio. The files stay, so that later runs use them again."""
    sync = [f"--fdatasync={BATCH}"] if kind == "write" else []
    command = [
        "fio",
        "--name=blocks",
        f"--directory={':'.join(map(str, folders))}",
        f"--numjobs={jobs}",
        "--thread",
        f"--rw={kind}",
        f"--bs={request}",
        f"--size={total // jobs // request * request}",
        "--ioengine=psync",
        "--direct=1",
        "--fallocate=native",
        "--group_reporting",
        "--output-format=json",
        *sync,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(result.stdout)["jobs"][0][kind]
    under_way = job["total_ios"] * job["lat_ns"]["mean"] / (1e6 * job["runtime"])
    return Speed(job["bw_bytes"], under_way / len(folders))


def throughput(root: Path, directories: int, depth: int, total: int) -> dict[str, list[Speed]]:
    """One round: each workload by the store and by fio, in fresh directories."""
    own = [root / f"store{number}" for number in range(directories)]
    theirs = [root / f"fio{number}" for number in range(directories)]
    for folder in own + theirs:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    request = slot_bytes(LAYOUT)
    count = total // LAYOUT.slot_bytes
    jobs = depth * directories
    threads = (depth + 1) * directories
    lanes = Lanes(depth)
    store = open_store(own, 20_000_000_000, lanes)
    first, second = make_blocks(count, 1), make_blocks(count, 2)
    size = count * LAYOUT.slot_bytes

    def speed(work: Callable[[DiskStore, Sequence[Block], int], float], what: list[Block]) -> Speed:
        lanes.times.clear()
        seconds = work(store, what, threads)
        return Speed(size / seconds, sum(lanes.times) / seconds / directories)

    results: dict[str, list[Speed]] = {}
    results["write"] = [speed(write_all, first), fio(theirs, "write", jobs, request, size)]
    store.erase(None)
    results["rewrite"] = [speed(write_all, second), fio(theirs, "write", jobs, request, size)]
    results["read"] = [speed(read_all, second), fio(theirs, "read", jobs, request, size)]
    store.close()
    lanes.close()
    return results


def compare(root: Path, rounds: int, total: int, only: set[str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for directories, depth in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2)):
        taken = [throughput(root, directories, depth, total) for _ in range(rounds)]
        for name in ("write", "rewrite", "read"):
            if name not in only:
                continue
            ours = [one[name][0] for one in taken]
            fios = [one[name][1] for one in taken]
            ratios = [a.bytes_per_s / b.bytes_per_s for a, b in zip(ours, fios, strict=True)]
            row: dict[str, object] = {
                "workload": name,
                "directories": directories,
                "depth_per_directory": depth,
                "store_mb_s": [round(speed.bytes_per_s / 1e6) for speed in ours],
                "fio_mb_s": [round(speed.bytes_per_s / 1e6) for speed in fios],
                "ratio_median": round(statistics.median(ratios), 3),
                "store_under_way": round(statistics.median(speed.depth for speed in ours), 2),
                "fio_under_way": round(statistics.median(speed.depth for speed in fios), 2),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def percentiles(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "median_us": round(1e6 * ordered[len(ordered) // 2], 2),
        "p99_us": round(1e6 * ordered[int(len(ordered) * 0.99)], 2),
    }


def timed(call: Callable[[], object], times: int = 5000) -> dict[str, float]:
    samples = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        samples.append(time.perf_counter() - started)
        if len(samples) % 50 == 0:
            time.sleep(0.001)
    return percentiles(samples)


def scheduler(root: Path) -> dict[str, object]:
    """Time per call on the scheduler's thread, with the I/O threads idle and busy."""
    folder = root / "scheduler"
    store = open_store([folder], 3_000_000_000)
    blocks = make_blocks(1024, 1)
    write_all(store, blocks, 2)
    path = [block.block_id for block in blocks]
    missing = [bytes([255] * 16)]
    calls: dict[str, Callable[[], object]] = {
        "contains_1_block": lambda: store.contains(path[:1]),
        "contains_miss": lambda: store.contains(missing),
        "contains_16_blocks": lambda: store.contains(path[:16]),
        "contains_1024_blocks": lambda: store.contains(path),
        "touch_1024_blocks": lambda: store.touch(path),
        "drain_removed": store.drain_removed,
    }
    result: dict[str, object] = {"idle": {name: timed(call) for name, call in calls.items()}}
    stop = threading.Event()

    def keep_reading() -> None:
        (into,) = slots(1)
        while not stop.is_set():
            for block in blocks:
                read(store, block, into)

    readers = [threading.Thread(target=keep_reading) for _ in range(2)]
    for reader in readers:
        reader.start()
    result["two_readers_in_this_process"] = {name: timed(call) for name, call in calls.items()}
    stop.set()
    for reader in readers:
        reader.join()
    store.close()
    shutil.rmtree(folder)
    for name, numbers in result.items():
        print(json.dumps({name: numbers}), flush=True)
    return result


def add_rows(index: Path, rows: int, slot_bytes: int) -> None:
    """Rows of blocks that are not there, in slabs of their own, into an index that is closed."""
    per_slab = 40_000
    connection = sqlite3.connect(index)
    slabs = range(1000, 1000 + -(-rows // per_slab))
    for number in slabs:
        connection.execute("INSERT INTO slabs VALUES(?,?,?)", (number, slot_bytes, per_slab))
        with (index.parent / f"slab-{number:08d}.dat").open("wb") as file:
            file.truncate(4096 + per_slab * slot_bytes)
    now = int(time.time() * 1e6)
    connection.executemany(
        "INSERT INTO blocks VALUES(1,?,1,?,?,?,?,0)",
        ((os.urandom(16), 1000 + n // per_slab, n % per_slab, now, now - n) for n in range(rows)),
    )
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def restart(root: Path, rows: int) -> dict[str, object]:
    """Opening an index with a million rows. Slab files are sparse: only the index is real."""
    folder = root / "restart"
    small = BlockLayout(LayerPlan(0, 4, 0), StateShape(4, 512, (512, 512), "bfloat16"))
    spec = DirectorySpec(str(folder), 400_000_000_000)
    model = StoredModel.of(small.chunks(), small.fingerprint("restart"), "restart")

    def opened() -> DiskStore:
        return DiskStore.open([spec], model, NO_UPKEEP)

    store = opened()
    real = make_blocks(1, 3)[0]
    buffer = aligned_buffer(small.slot_bytes)
    store.write_many([(real, buffer)])
    store.close()
    index = folder / "sglang-hc" / "index.sqlite"
    add_rows(index, rows - 1, slot_bytes(small))
    runs = []
    for cold in (True, False, False):
        if cold:
            descriptor = os.open(index, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        started, cpu = time.perf_counter(), time.process_time()
        store = opened()
        looked = time.perf_counter()
        found = store.contains([real.block_id])
        status = read(store, real, buffer)
        ended = time.perf_counter()
        if found != 1 or status is not Outcome.OK or len(store.block_ids()) != rows:
            raise RuntimeError("the index did not come back whole")
        runs.append(
            {
                "index_in_page_cache": not cold,
                "open_s": round(looked - started, 3),
                "first_hit_s": round(ended - started, 3),
                "cpu_s": round(time.process_time() - cpu, 3),
            }
        )
        store.close()
    result = {"rows": rows, "index_mb": round(index.stat().st_size / 1e6), "runs": runs}
    shutil.rmtree(folder)
    print(json.dumps(result), flush=True)
    return result


def machine(root: Path) -> dict[str, object]:
    def said(*words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()

    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    fio = ["fio", "--version"] if shutil.which("fio") else ["true"]  # not every workload needs it
    return {
        "cpu": cpu[0].split(":")[1].strip() if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "file_system": said("findmnt", "-n", "-o", "FSTYPE,OPTIONS", "-T", str(root)),
        "fio": said(*fio),
        "huge_pages_for_shared_memory": page_setting(),
        "python": platform.python_version(),
        "commit": said("git", "rev-parse", "--short", "HEAD"),
        "load_average_at_start": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="a directory on the file system to measure")
    parser.add_argument("--out", help="write the results to this JSON file")
    parser.add_argument("--only", action="append", choices=WORKLOADS, help="repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1024, help="per arm and workload")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the restart workload")
    args = parser.parse_args()
    only = set(args.only or WORKLOADS)
    if only & {"write", "rewrite", "read"} and shutil.which("fio") is None:
        parser.error("fio is not installed; apt-get install fio, or use --only scheduler/restart")
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="hc-disk-bench-") as folder:
        root = Path(folder)
        result: dict[str, object] = {
            "command": command(),
            "machine": machine(root),
            "block_bytes": LAYOUT.slot_bytes,
            "blocks_per_sync": BATCH,
        }
        if only & {"write", "rewrite", "read"}:
            result["throughput"] = compare(root, args.rounds, args.megabytes << 20, only)
        if "scheduler" in only:
            result["scheduler_thread"] = scheduler(root)
        if "restart" in only:
            result["restart"] = restart(root, args.rows)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
