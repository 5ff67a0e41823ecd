"""The disk store against fio on the same file system in the same run, and its calls on the
scheduler thread.

Named workloads (all by default, or `--only NAME`):
  write      blocks into a new directory; fio: as many new files
  read       the same blocks, verified; fio: its files again
  replace    as many blocks again, most in the place of old ones; fio: over the same files
  scheduler  microseconds on the calling thread of contains, touch and take_changes

The store works as in a server: `DiskThreads` with its readers and writers in each directory and
O_DIRECT. fio runs psync with O_DIRECT and as many jobs in each directory as the store has readers:
a job reads what it wrote. Both have one file for each block, of the same length, which is written
and read by one call (the store's calls end at 4 MiB), and neither syncs. What the store does
besides: it computes a digest of every byte, gives each file its name when it is whole, and notes
its time; in `replace` it chooses what goes and renames its file before it writes over it. fio opens
and closes its files.

`store_under_way` and `fio_under_way` tell how many reads or writes each directory had on average
over the time: what is missing to the number of threads is time in which the disk waited. The arms
take turns; ratios are medians over the rounds. Needs fio: apt-get install fio.

    python -m benchmark.disk.compare_fio --dir /mnt/ssd --output result.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmark.harness import machine
from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import Block, DirectorySpec, DiskStore, Outcome, StoredModel, Upkeep
from sglang_hc.store.disk.backend import DirectBackend, File
from sglang_hc.store.disk.threads import READ_THREADS, DiskThreads
from sglang_hc.store.host_pool import HostPool

if TYPE_CHECKING:  # older packages, which `interleaved` runs with, have it elsewhere
    from sglang_hc.store.block_io import LocalBlockIo

AGAINST_FIO = ("write", "read", "replace")
WORKLOADS = (*AGAINST_FIO, "scheduler")
NO_UPKEEP = Upkeep(background=False)
SLOTS = 64
"""Blocks under way: enough that no thread waits while nobody polls."""


def layout_of(kib: int) -> BlockLayout:
    """Blocks of so many KiB: eight layers, as hidden states."""
    return BlockLayout(LayerPlan(0, 8, 0), StateShape(8, kib * 2, (1, 1), "uint8"))


def model_of(layout: BlockLayout) -> StoredModel:
    return StoredModel.of(layout.chunks(), layout.fingerprint("benchmark"), "benchmark")


def make_blocks(count: int, seed: int) -> list[Block]:
    """Blocks whose identities, as those of a server, spread over all folders."""
    names = [xxhash.xxh3_128_digest(b"%d %d" % (seed, number)) for number in range(count)]
    return [Block(name, names[0], "", i, bytes(256)) for i, name in enumerate(names)]


class Timed(DirectBackend):
    """The real disk. times: seconds that each read and write took, for whoever empties it."""

    def __init__(self) -> None:
        super().__init__(direct=True)
        self.times: deque[float] = deque()

    def _open(self, path: str, flags: int) -> File:
        return _TimedFile(super()._open(path, flags), self.times)


class _TimedFile:
    def __init__(self, file: File, times: deque[float]) -> None:
        self._file, self._times = file, times
        self.close = file.close

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        started = time.perf_counter()
        done = self._file.read(buffers, offset)
        self._times.append(time.perf_counter() - started)
        return done

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        started = time.perf_counter()
        self._file.write(buffers, offset)
        self._times.append(time.perf_counter() - started)


class Speed(NamedTuple):
    """Bytes per second; the reads or writes under way in each directory on average over the time;
    processor seconds for each GB."""

    bytes_per_s: float
    under_way: float
    cpu_s_per_gb: float


def seconds_of(
    io: LocalBlockIo, blocks: Sequence[Block], begin: Callable[[int, Block, int], None]
) -> float:
    """How long one operation on each block takes, with SLOTS under way. begin: hands one in, by
    ticket, block and slot."""
    started = time.perf_counter()
    left, free = deque(enumerate(blocks)), deque(range(SLOTS))
    taken: dict[int, int] = {}
    while left or taken:
        while left and free:
            ticket, block = left.popleft()
            taken[ticket] = free.popleft()
            begin(ticket, block, taken[ticket])
        time.sleep(0.001)
        for done in io.poll():
            if done.outcome is not Outcome.OK:
                raise RuntimeError(f"a block was not written or read: {done.outcome}")
            free.append(taken.pop(done.ticket))
    return time.perf_counter() - started


class Served:
    """A store behind the threads of a server, and memory for its blocks."""

    def __init__(self, folders: Sequence[Path], layout: BlockLayout, files: int) -> None:
        """files: for how many of them each directory has room."""
        model = model_of(layout)
        self._timed = Timed()
        self._layout = layout
        self._pool = HostPool(layout, SLOTS)
        self._pool.bytes[:] = 7
        self._directories = len(folders)
        self.counts: Counter[str] = Counter()
        specs = [DirectorySpec(str(folder), files * model.file_bytes) for folder in folders]
        store = DiskStore.open(specs, model, NO_UPKEEP, self._timed)
        self._io = DiskThreads(store, self._pool, self.counts)

    def write(self, blocks: Sequence[Block]) -> Speed:
        end = time.monotonic() + 3600
        return self._measured(
            blocks, lambda ticket, block, slot: self._io.write(ticket, block, slot, end)
        )

    def read(self, blocks: Sequence[Block]) -> Speed:
        end = time.monotonic() + 3600

        return self._measured(
            blocks, lambda ticket, block, slot: self._io.read(ticket, block.block_id, slot, end)
        )

    def close(self) -> None:
        self._io.close()

    def _measured(self, blocks: Sequence[Block], begin: Callable[[int, Block, int], None]) -> Speed:
        """begin: see `seconds_of`."""
        self._timed.times.clear()
        cpu = time.process_time()
        seconds = seconds_of(self._io, blocks, begin)
        cpu = time.process_time() - cpu
        size = len(blocks) * self._layout.slot_bytes
        under_way = sum(self._timed.times) / seconds / self._directories
        return Speed(size / seconds, under_way, cpu / size * 1e9)


def fio(folders: Sequence[Path], kind: str, jobs: int, request: int, files: int) -> Speed:
    """Runs fio on so many files of one request each. They stay, and later runs use them again."""
    words = [
        "fio", "--name=blocks", f"--directory={':'.join(map(str, folders))}",
        f"--numjobs={jobs}", "--thread", f"--rw={kind}", f"--bs={request}",
        f"--nrfiles={files // jobs}", f"--filesize={request}", "--openfiles=1",
        "--file_service_type=sequential", "--create_on_open=1", "--fallocate=none",
        "--ioengine=psync", "--direct=1", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    job = json.loads(result.stdout)["jobs"][0]
    did = job[kind]
    under_way = did["total_ios"] * did["lat_ns"]["mean"] / (1e6 * did["runtime"])
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Speed(did["bw_bytes"], under_way / len(folders), busy / did["io_bytes"] * 1e9)


def throughput(
    root: Path, directories: int, layout: BlockLayout, count: int, only: set[str]
) -> dict[str, tuple[Speed, Speed]]:
    """One round: each workload by the store and by fio, in fresh directories."""
    own = [root / f"store{number}" for number in range(directories)]
    theirs = [root / f"fio{number}" for number in range(directories)]
    for folder in own + theirs:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    request, share = model_of(layout).file_bytes, count // directories
    # Blocks are dealt by a hash, so that directories do not get exactly as many.
    served = Served(own, layout, share + share // 8 + 8)
    first, second = make_blocks(count, 1), make_blocks(count, 2)

    def turn(ours: Speed, kind: str) -> tuple[Speed, Speed]:
        return ours, fio(theirs, kind, READ_THREADS * directories, request, count)

    results = {"write": turn(served.write(first), "write")}
    if "read" in only:
        results["read"] = turn(served.read(first), "read")
    if "replace" in only:
        results["replace"] = turn(served.write(second), "write")
    served.close()
    return results


def compare(
    root: Path, rounds: int, total: int, only: set[str], sizes: Sequence[int]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for kib, directories in ((kib, directories) for kib in sizes for directories in (1, 2)):
        layout = layout_of(kib)
        jobs = directories * READ_THREADS  # as many files for each of them
        count = max(1, total // layout.slot_bytes // jobs) * jobs
        taken = [throughput(root, directories, layout, count, only) for _ in range(rounds)]
        for name in AGAINST_FIO:
            if name in only:
                speeds = [one[name] for one in taken]
                place = {"workload": name, "block_kib": kib, "directories": directories}
                rows.append({**place, "blocks": count, **_row(speeds)})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def _row(speeds: Sequence[tuple[Speed, Speed]]) -> dict[str, object]:
    ratios = [ours.bytes_per_s / theirs.bytes_per_s for ours, theirs in speeds]
    row: dict[str, object] = {"ratio_median": round(statistics.median(ratios), 3)}
    for number, name in enumerate(("store", "fio")):
        some = [pair[number] for pair in speeds]
        row[f"{name}_mb_s"] = [round(one.bytes_per_s / 1e6) for one in some]
        row[f"{name}_under_way"] = round(statistics.median(one.under_way for one in some), 2)
        cost = statistics.median(one.cpu_s_per_gb for one in some)
        row[f"{name}_cpu_s_per_gb"] = round(cost, 3)
    return row


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
    folder, layout = root / "scheduler", layout_of(2048)
    spec = DirectorySpec(str(folder), 3_000_000_000)
    store = DiskStore.open([spec], model_of(layout), NO_UPKEEP)
    pool = HostPool(layout, 2)
    blocks = make_blocks(1024, 1)
    for block in blocks:
        if store.write(block, pool.view(0)) is not Outcome.OK:
            raise RuntimeError("a block was not written")
    path = [block.block_id for block in blocks]
    missing = [bytes([255] * 16)]
    calls: dict[str, Callable[[], object]] = {
        "contains_1_block": lambda: store.contains(path[:1]),
        "contains_miss": lambda: store.contains(missing),
        "contains_16_blocks": lambda: store.contains(path[:16]),
        "contains_1024_blocks": lambda: store.contains(path),
        "touch_1024_blocks": lambda: store.touch(path),
        "take_changes": store.take_changes,
    }
    result: dict[str, object] = {"idle": {name: timed(call) for name, call in calls.items()}}
    stop = threading.Event()

    def keep_reading(slot: int) -> None:
        while not stop.is_set():
            for block in blocks:
                store.read(block.block_id, pool.view(slot))

    readers = [threading.Thread(target=keep_reading, args=(slot,)) for slot in range(2)]
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


def machine_with(root: Path) -> dict[str, object]:
    """This machine, the file system of a directory, and fio where it is there."""

    def said(*words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()

    file_system = said("findmnt", "-n", "-o", "FSTYPE,OPTIONS", "-T", str(root))
    fio = said("fio", "--version") if shutil.which("fio") else ""
    return {**machine.describe(), "file_system": file_system, "fio": fio}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="a directory on the file system to measure")
    parser.add_argument("--output", "--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--only", action="append", choices=WORKLOADS, help="repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1024, help="per arm and workload")
    parser.add_argument("--kib", type=int, nargs="+", default=[128, 2048], help="sizes of a block")
    args = parser.parse_args()
    only = set(args.only or WORKLOADS)
    if only & {*AGAINST_FIO} and shutil.which("fio") is None:
        parser.error("fio is not installed; apt-get install fio, or use --only scheduler")
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="hc-disk-bench-") as folder:
        root = Path(folder)
        result: dict[str, object] = {"command": machine.command(), "machine": machine_with(root)}
        if only & {*AGAINST_FIO}:
            total = args.megabytes << 20
            result["throughput"] = compare(root, args.rounds, total, only, args.kib)
        if "scheduler" in only:
            result["scheduler_thread"] = scheduler(root)
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
