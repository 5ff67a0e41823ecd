"""The disk stores of two checkouts in turn, on the same file system in the same run.

Each turn is a process of its own that imports the store of one checkout, with `DiskThreads` as in a
server and O_DIRECT. In GB/s of blocks:

  empty   blocks into a new directory, until its budget is taken
  full    as many again, in the place of those
  read    these again, verified

Turns are taken A B A B; ratios are of medians. 470b1bb is the last commit with disk format 2. What
is imported of `compare_fio` has to run with both packages. All directories stay until the end,
because ext4 is slow at making files where many have just gone: that takes rounds x sizes x 2 x
`--megabytes` of room.

    git worktree add /tmp/before 470b1bb
    python -m benchmark.disk.interleaved --before /tmp/before --dir /mnt/ssd --output result.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmark.disk.compare_fio import (
    NO_UPKEEP,
    SLOTS,
    layout_of,
    machine_with,
    make_blocks,
    model_of,
    seconds_of,
)
from benchmark.harness.machine import command
from sglang_hc.store.disk import Block, DirectorySpec, DiskStore
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.host_pool import HostPool

HERE = Path(__file__).resolve().parents[2]
WORKLOADS = ("empty", "full", "read")


def turn(root: Path, kib: int, megabytes: int) -> dict[str, float]:
    """The workloads once, with the store that this process imported."""
    layout = layout_of(kib)
    count = (megabytes << 20) // layout.slot_bytes
    budget = count * (layout.slot_bytes + 4096)
    folder = tempfile.mkdtemp(dir=root)
    pool = HostPool(layout, SLOTS)
    for slot in range(SLOTS):
        pool.view(slot)[:] = bytes([7]) * len(pool.view(slot))
    store = DiskStore.open([DirectorySpec(folder, budget)], model_of(layout), NO_UPKEEP)
    io, end = DiskThreads(store, pool, Counter()), time.monotonic() + 3600

    def write(ticket: int, block: Block, slot: int) -> None:
        io.write(ticket, block, slot, end)

    def read(ticket: int, block: Block, slot: int) -> None:
        io.read(ticket, block.block_id, slot, end)

    def speed(blocks: Sequence[Block], begin: Callable[[int, Block, int], None]) -> float:
        size = len(blocks) * layout.slot_bytes
        return round(size / seconds_of(io, blocks, begin) / 1e9, 3)

    fresh = make_blocks(count, 2)
    speeds = {"empty": speed(make_blocks(count, 1), write), "full": speed(fresh, write)}
    kept = [block for block in fresh if store.contains([block.block_id])]
    speeds["read"] = speed(kept, read)
    io.close()
    return speeds


def turn_of(checkout: Path, root: Path, kib: int, megabytes: int) -> dict[str, float]:
    """A turn in a process that imports the package of that checkout, and this script."""
    code = (
        "import sglang_hc, json, pathlib; "  # first: `benchmark` looks for its own package
        "from benchmark.disk.interleaved import turn; "
        f"speeds = turn(pathlib.Path({str(root)!r}), {kib}, {megabytes}); "
        "print(sglang_hc.__file__, json.dumps(speeds))"
    )
    path = os.pathsep.join([str(checkout / "python"), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{checkout}: {done.stderr[-2000:]}")
    package, _, answer = done.stdout.splitlines()[-1].partition(" ")
    if not Path(package).is_relative_to(checkout.resolve()):
        raise RuntimeError(f"{checkout}: the package came from {package}")
    speeds: dict[str, float] = json.loads(answer)
    return speeds


def compare(args: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kib in args.kib:
        before, now = [], []
        for _ in range(args.rounds):
            before.append(turn_of(args.before, root, kib, args.megabytes))
            now.append(turn_of(HERE, root, kib, args.megabytes))
        for name in WORKLOADS:
            old, new = [one[name] for one in before], [one[name] for one in now]
            ratio = statistics.median(new) / statistics.median(old)
            row = {"workload": name, "block_kib": kib, "before_gb_s": old, "now_gb_s": new}
            rows.append({**row, "ratio_of_medians": round(ratio, 3)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> dict[str, object]:
    """For `benchmark/make_tables.py`: medians of both stores and their ratio, by block size."""
    cells: dict[int, dict[str, str]] = {}
    for row in rows:
        old, new = (statistics.median(row[name]) for name in ("before_gb_s", "now_gb_s"))
        cell = f"{old:.2f}, {new:.2f} ({row['ratio_of_medians']:.2f})"
        cells.setdefault(row["block_kib"], {})[row["workload"]] = cell
    body = [[f"{kib} KiB", *(cells[kib][name] for name in WORKLOADS)] for kib in cells]
    return {"columns": ["block", *WORKLOADS], "rows": body}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="on the file system to measure"
    )
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=1024, help="per workload")
    parser.add_argument("--kib", type=int, nargs="+", default=[128, 512, 2048], help="of a block")
    args = parser.parse_args()
    said = subprocess.run(
        ["git", "-C", str(args.before), "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    about = {"command": command(), "machine": machine_with(args.dir), "before": said.stdout.strip()}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="hc-disk-bench-") as folder:
        rows = compare(args, Path(folder))
    if args.output:
        result = {**about, "rows": rows, "tables": {"before": table(rows)}}
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
