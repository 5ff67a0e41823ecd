"""How long a start takes with a directory full of blocks, and what memory their names take.

    python -m benchmark.disk.cold_start --dir /mnt/ssd --output result.json
    sudo .venv/bin/python -m benchmark.disk.cold_start --dir /mnt/ssd --drop-caches

The blocks are empty files with the right names and lengths: a start reads names and times, and no
file. In each run a process of its own opens the store. `names_s` is the time until it can be asked
for blocks, `uses_s` the time from then on until it knows when each was used last, which a server
learns beside serving. A run is warm where the system has the directory's entries in memory. With
`--drop-caches`, for root, as many runs are cold: the system forgets entries and pages before each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmark.disk.compare_fio import NO_UPKEEP, layout_of, machine_with, model_of
from benchmark.harness.machine import command
from sglang_hc.store.disk import DirectorySpec, DiskStore

LAYOUT = layout_of(128)
MODEL = model_of(LAYOUT)
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def open_store(folder: str, blocks: int) -> DiskStore:
    spec = DirectorySpec(folder, (blocks + 64) * MODEL.file_bytes)
    return DiskStore.open([spec], MODEL, NO_UPKEEP)


def make_files(folder: str, blocks: int) -> None:
    """Empty files with the names and the length of blocks, in a directory that is not open."""
    store = open_store(folder, blocks)
    names = store.directories[0].folder
    store.close()
    for leaf, _ in names.leaves():
        os.makedirs(leaf, 0o700)
    for _ in range(blocks):
        path = names.block_path(os.urandom(16))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, MODEL.file_bytes)
        os.close(descriptor)


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def start(folder: str, blocks: int) -> dict[str, float]:
    """Open a store with so many blocks in a process that has done nothing else."""
    before, cpu, began = resident_mb(), time.process_time(), time.perf_counter()
    store = open_store(folder, blocks)
    if len(store) != blocks:
        raise RuntimeError(f"{len(store)} of {blocks} blocks were found")
    names = time.perf_counter()
    for directory in store.directories:
        directory.learn_uses()
    uses = time.perf_counter()
    row = {
        "names_s": names - began,
        "uses_s": uses - names,
        "cpu_s": time.process_time() - cpu,
        "memory_mb": resident_mb() - before,
    }
    store.close()
    return {name: round(value, 3) for name, value in row.items()}


def measured(folder: str, blocks: int, cold: bool) -> dict[str, object]:
    """Raises OSError where the system's caches cannot be dropped."""
    if cold:
        os.sync()
        DROP_CACHES.write_text("3\n")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        row: dict[str, object] = {"cold": cold, **pool.submit(start, folder, blocks).result()}
    print(json.dumps(row), flush=True)
    return row


def medians(runs: list[dict[str, object]], cold: bool) -> dict[str, float]:
    names = ("names_s", "uses_s", "cpu_s", "memory_mb")
    some = [run for run in runs if run["cold"] is cold]
    return {name: statistics.median(float(str(run[name])) for run in some) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="a directory on the file system to measure")
    parser.add_argument("--output", "--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drop-caches", action="store_true", help="measure cold starts too")
    args = parser.parse_args()
    if args.drop_caches and not os.access(DROP_CACHES, os.W_OK):
        parser.error(f"--drop-caches: {DROP_CACHES} cannot be written; run this as root")
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="hc-cold-start-") as folder:
        result: dict[str, object] = {"command": command(), "machine": machine_with(Path(folder))}
        began = time.perf_counter()
        make_files(folder, args.blocks)
        print(f"made {args.blocks} files in {time.perf_counter() - began:.1f} s", flush=True)
        measured(folder, args.blocks, False)  # until everything is warm
        kinds = (True, False) if args.drop_caches else (False,)
        runs = [measured(folder, args.blocks, c) for _ in range(args.rounds) for c in kinds]
        result |= {"blocks": args.blocks, "runs": runs}
        for name, cold in (("cold", True), ("warm", False)):
            if cold in kinds:
                result[name] = medians(runs, cold)
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
