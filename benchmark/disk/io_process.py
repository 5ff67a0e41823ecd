"""What the I/O process costs the scheduler thread, and how fast it is there.

    python -m benchmark.disk.io_process --dir /mnt/ssd --out result.json

Workloads:
  operations  time on the caller's thread per operation, sending included, with `--hc-io thread`
              and `process`, arms interleaved; in passes with one and with eight operations, each
              after a quiet moment; while nothing else happens, and while 4 reads are always under
              way; and what waking any process costs there
  start       an index of a million synthetic rows: ready, first hit, memory, back after SIGKILL,
              the longest single poll on the way, on the clock and of this thread's own work, and
              what a full garbage collection of this process costs beside the mirror
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_hc.store.process.clients import ProcessExecutor
from sglang_hc.store.process.messages import DiskSpec
from sglang_hc.store.process.opening import Io, open_io

from benchmark.disk.compare_fio import LAYOUT, add_rows, machine, percentiles, slot_bytes
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.block_io import OwnDisk
from sglang_hc.store.disk import Block, DirectorySpec
from sglang_hc.store.executor import CopyRows, RowSpan, ScatterRows
from sglang_hc.store.host_memory import MemorySpec
from sglang_hc.store.outcome import Outcome
from sglang_hc.tools.bench.machine import command
from sglang_hc.tree.identity import block_id, pack_tokens, root_id

SLOTS = 128
FINGERPRINT = bytes(16)
SPANS = tuple(RowSpan(row, row, 0, 1) for row in range(16))
"""One decode step of 16 requests."""
REST_S = 0.0005
TURNS = 150
UNANSWERED = ("touch_16",)
TICKETS = itertools.count(1)


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
        done += own_disk(io).poll()
        time.sleep(0.0002)
    return done


def own_disk(io: Io) -> OwnDisk:
    assert io.blocks is not None, "it was opened with a disk"
    return io.blocks


class Passes:
    """Scheduling passes over one Io: what they hand in, what they send, what they take in.

    Samples are seconds on the caller's thread. NAME_1 is a pass with one operation, NAME_8 one of a
    pass with eight of them; the sending that ends the pass is in both. `poll_N` is both polls of a
    pass that take in N answers.
    """

    def __init__(self, io: Io, names: list[bytes], busy: bool) -> None:
        self._io, self._blocks = io, own_disk(io)
        self._names = names
        self._behind = 4 if busy else 0
        self._owed = 0
        self._turn = 0
        self.samples: dict[str, list[float]] = {}

    def sample(self, name: str, seconds: float) -> None:
        self.samples.setdefault(name, []).append(seconds)

    def hand_in(self, name: str, call: Callable[[int], object], count: int) -> None:
        """A pass with `count` operations after a quiet moment. Then wait for their answers."""
        self._read_behind()
        rest()
        started = time.perf_counter()
        for index in range(count):
            call(index)
        self._blocks.flush()
        self.sample(f"{name}_{count}", (time.perf_counter() - started) / count)
        self._owed += count if name not in UNANSWERED else 0
        while True:
            rest()
            self._poll()
            if self._owed <= self._behind:
                return

    def look_up(self, name: str, block_ids: list[bytes]) -> None:
        rest()
        started = time.perf_counter()
        self._blocks.contains(block_ids)
        self.sample(name, time.perf_counter() - started)

    def end(self) -> None:
        while self._owed:
            rest()
            self._poll()

    def _poll(self) -> None:
        started = time.perf_counter()
        answers = len(self._io.executor.poll()) + len(self._blocks.poll())
        took = time.perf_counter() - started
        self._owed -= answers
        self.sample(("poll_0", "poll_1", "poll_many")[min(answers, 2)], took)
        if answers > 1:
            self.sample("poll_many_per_answer", took / answers)

    def _read_behind(self) -> None:
        """Keep reads under way that no sample is about."""
        while self._owed < self._behind:
            slot = 80 + self._turn % 16
            self._turn += 1
            self._blocks.read(next(TICKETS), self._names[slot % 64], slot, far())
            self._owed += 1
        self._blocks.flush()


def rest() -> None:
    """Between passes. SGLang's loop never sleeps, but ZMQ's threads do when they have no work."""
    end = time.perf_counter() + REST_S
    while time.perf_counter() < end:
        pass


class Sleeper:
    """Another process that sleeps, and what waking it costs: the least that any message can."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0)
        os.set_inheritable(self._bell, True)
        code = f"import os\nwhile os.eventfd_read({self._bell}) < 1000: pass"
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[self._bell])
        time.sleep(0.2)

    def wake(self) -> float:
        rest()
        started = time.perf_counter()
        os.eventfd_write(self._bell, 1)
        return time.perf_counter() - started

    def close(self) -> None:
        os.eventfd_write(self._bell, 1000)
        self._process.wait()
        os.close(self._bell)


def operations(kind: str, folder: Path, busy: bool) -> dict[str, dict[str, float]]:
    memory = MemorySpec(LAYOUT, SLOTS, BLOCK_TOKENS, 2)
    disk = DiskSpec((DirectorySpec(str(folder), 3_000_000_000),), FINGERPRINT, "benchmark", 0)
    io = open_io(kind, memory, disk)
    own = own_disk(io)
    blocks = make_path(64)
    names = [block.block_id for block in blocks]
    for slot, block in enumerate(blocks):
        own.write(next(TICKETS), block, slot, far())
    drain(io, len(blocks))
    end = time.monotonic() + 600
    calls: dict[str, Callable[[int], object]] = {
        # A block that is there already: the same for the caller, and no disk is worn out.
        "write": lambda index: own.write(next(TICKETS), blocks[index], index, end),
        "read": lambda index: own.read(next(TICKETS), names[index], 64 + index, end),
        "touch_16": lambda index: own.touch(names[:16]),
        "file_16_rows": lambda index: io.executor.submit(next(TICKETS), ScatterRows(0, SPANS)),
        "copy_rows": lambda index: io.executor.submit(next(TICKETS), CopyRows(96, 97, 1)),
    }
    passes = Passes(io, names, busy)
    sleeper = Sleeper()
    for _ in range(TURNS):
        for count in (1, 8):
            for name, call in calls.items():
                passes.hand_in(name, call, count)
        passes.look_up("contains_16", names[:16])
        passes.look_up("contains_1024", names * 16)
        passes.sample("wake_a_process", sleeper.wake())
    passes.end()
    sleeper.close()
    own.close()
    io.executor.close()
    return {name: percentiles(samples) for name, samples in sorted(passes.samples.items())}


def resident_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


def start(folder: Path, rows: int) -> dict[str, object]:
    small = BlockLayout(LayerPlan(0, 4, 0), StateShape(4, 512, (512, 512), "bfloat16"))
    memory = MemorySpec(small, 16, BLOCK_TOKENS, 1)
    disk = DiskSpec((DirectorySpec(str(folder), 400_000_000_000),), FINGERPRINT, "start", 0)
    block = make_path(1)[0]
    io = open_io("process", memory, disk)
    own = own_disk(io)
    own.write(next(TICKETS), block, 0, far())
    drain(io, 1)
    own.close()
    io.executor.close()
    add_rows(folder / "sglang-hc" / "index.sqlite", rows - 1, slot_bytes(small))

    before = resident_mb(os.getpid())
    started = time.perf_counter()
    io = open_io("process", memory, disk)
    own = own_disk(io)
    ready = time.perf_counter() - started
    assert own.contains([block.block_id]) == 1
    own.read(next(TICKETS), block.block_id, 1, far())
    assert drain(io, 1)[0].outcome is Outcome.OK
    hit = time.perf_counter() - started
    started = time.perf_counter()
    gc.collect()
    collection = time.perf_counter() - started
    assert isinstance(io.executor, ProcessExecutor)
    pid = io.executor.supervisor.pid
    assert pid is not None, "it answered just now"
    sizes = {
        "process_mb": resident_mb(pid),
        "mirror_mb": resident_mb(os.getpid()) - before,
        "blocks": own.levels()["disk_blocks"],
    }
    os.kill(pid, signal.SIGKILL)
    started = time.perf_counter()
    polls, work = [], []
    while io.counts["io_restarts"] == 0:
        begun, worked = time.perf_counter(), time.thread_time()
        own.poll()
        polls.append(time.perf_counter() - begun)
        work.append(time.thread_time() - worked)
        time.sleep(0.0005)
    back = time.perf_counter() - started
    own.close()
    io.executor.close()
    return {
        "rows": rows,
        "ready_s": round(ready, 3),
        "first_hit_s": round(hit, 3),
        **sizes,
        "back_after_sigkill_s": round(back, 3),
        "full_collection_ms": round(1e3 * collection, 2),
        "longest_poll_ms": round(1e3 * max(polls), 2),
        "longest_poll_work_ms": round(1e3 * max(work), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="a directory on the file system to use")
    parser.add_argument("--out", help="write the results to this JSON file")
    parser.add_argument("--only", choices=("operations", "start"), help="both by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="hc-io-bench-") as folder:
        root = Path(folder)
        result: dict[str, object] = {
            "command": command(),
            "machine": machine(root),
        }
        for busy in (False, True) if args.only != "start" else ():
            rounds = [
                {
                    kind: operations(kind, root / f"{kind}-{busy}-{number}", busy)
                    for kind in ("thread", "process")
                }
                for number in range(args.rounds)
            ]
            result["reads_under_way" if busy else "idle"] = rounds
        if args.only != "operations":
            result["start"] = [start(root / f"start-{n}", args.rows) for n in range(args.rounds)]
    print(json.dumps(result, indent=2))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
