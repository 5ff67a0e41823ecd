"""What this device and its link can do: rates of copies and products, and the time pinning takes.

    python -m benchmark.gpu.device --cells FILE [--rehearse]

Every rate is a median of repeats. Beside bytes a second stands what one call costs the calling
thread: many small copies are bound by that and not by the link. Without a GPU the same code runs
on memory copies, which shows that it works and nothing else.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark.harness import machine
from benchmark.harness.cells import CellFile
from sglang_hc.device.copy_stream import CopyStream, copy_stream_for
from sglang_hc.device.cuda_copies import Ranges

REPEATS = 7
MIB = 1 << 20
GIB = 1 << 30
ROW = 8192
"""Bytes of a hidden state of a 7B model in bfloat16."""

BLOCK = 64
PINNED_GIB = (4, 16)


class Bench:
    """Buffers on both sides, and a clock. size: bytes of a long copy."""

    def __init__(self, size: int) -> None:
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.size = size
        self.copy_stream: CopyStream = copy_stream_for(self.device)
        self.pageable = torch.ones(size, dtype=torch.uint8)
        self.pinned = self._pinned()
        self.on_device = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.other = torch.zeros(size, dtype=torch.uint8, device=self.device)

    def _pinned(self) -> torch.Tensor:
        buffer = mmap.mmap(-1, self.size)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        tensor.fill_(1)
        self.copy_stream.pin(buffer)
        return tensor

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def rate(self, work: Callable[[], object], moved: int, calls: int) -> dict[str, Any]:
        """Of `work`, which moves so many bytes by so many calls."""
        work()
        seconds, submitting = [], []
        for _ in range(REPEATS):
            self.wait()
            begin = time.perf_counter()
            work()
            submitted = time.perf_counter()
            self.wait()
            seconds.append(time.perf_counter() - begin)
            submitting.append(submitted - begin)
        median = statistics.median(seconds)
        return {
            "gb_per_s": moved / median / 1e9,
            "seconds": median,
            "bytes": moved,
            "calls": calls,
            "us_per_call": 1e6 * statistics.median(submitting) / calls,
        }


def to_device(bench: Bench) -> dict[str, Any]:
    """Pinned memory to the device, one long copy by the copy stream."""
    return bench.rate(lambda: bench.copy_stream.copy(bench.on_device, bench.pinned), bench.size, 1)


def to_device_pageable(bench: Bench) -> dict[str, Any]:
    return bench.rate(lambda: bench.on_device.copy_(bench.pageable), bench.size, 1)


def to_host(bench: Bench) -> dict[str, Any]:
    return bench.rate(lambda: bench.copy_stream.copy(bench.pinned, bench.on_device), bench.size, 1)


def to_host_pageable(bench: Bench) -> dict[str, Any]:
    return bench.rate(lambda: bench.pageable.copy_(bench.on_device), bench.size, 1)


def both_ways(bench: Bench) -> dict[str, Any]:
    """Half of the pinned memory each way at once, as a restoration beside a snapshot."""
    half, back = bench.size // 2, bench.copy_stream.opposite()

    def work() -> None:
        bench.copy_stream.copy(bench.on_device[:half], bench.pinned[:half])
        back.copy(bench.pinned[half:], bench.other[half:])

    return bench.rate(work, 2 * half, 2)


def rows_of(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer of adjacent blocks: (blocks, block bytes) with a stride of two, and its target."""
    width = BLOCK * ROW
    source = bench.pinned.view(-1, 2 * width)[:, :width]
    return bench.on_device[: source.numel()].view(-1, width), source


def two_dimensional(bench: Bench) -> dict[str, Any]:
    """Adjacent slots: one copy of rows that lie apart."""
    target, source = rows_of(bench)
    return bench.rate(lambda: bench.copy_stream.copy(target, source), source.numel(), 1)


def block_by_block(bench: Bench) -> dict[str, Any]:
    """Scattered slots: a copy for every block."""
    target, source = rows_of(bench)
    order = torch.randperm(len(source)).tolist()

    def work() -> None:
        for at, block in enumerate(order):
            bench.copy_stream.copy(target[at], source[block])

    return bench.rate(work, source.numel(), len(order))


def batched(bench: Bench) -> dict[str, Any]:
    """Scattered slots: all blocks as one batch."""
    target, source = rows_of(bench)
    count, width = source.shape
    order = np.random.default_rng(0).permutation(count)
    sizes = np.full(count, width)
    ranges = Ranges(order * source.stride(0), np.arange(count) * width, sizes)
    return bench.rate(
        lambda: bench.copy_stream.copy_ranges(target, source, ranges), source.numel(), 1
    )


def on_the_device(bench: Bench) -> dict[str, Any]:
    return bench.rate(lambda: bench.other.copy_(bench.on_device), 2 * bench.size, 1)


def products(bench: Bench) -> dict[str, Any]:
    """A large square product in bfloat16."""
    side = 8192 if bench.cuda else 256
    left, right = (torch.randn(side, side, device=bench.device).bfloat16() for _ in "ab")
    found = bench.rate(lambda: torch.mm(left, right), 0, 1)
    return {"tflop_per_s": 2 * side**3 / found["seconds"] / 1e12, "side": side}


def pin(gib: float) -> dict[str, Any]:
    """Take and pin memory as a host pool does: the time that a server's start waits for it."""
    copy_stream = copy_stream_for(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    buffer = mmap.mmap(-1, int(gib * GIB))
    begin = time.perf_counter()
    copy_stream.pin(buffer)
    seconds = time.perf_counter() - begin
    copy_stream.close()
    return {"gib": gib, "seconds": seconds, "gib_per_s": gib / seconds}


COPIES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "pinned to device": to_device,
    "device to pinned": to_host,
    "both ways at once": both_ways,
    "adjacent blocks, one 2-D copy": two_dimensional,
    "scattered blocks, a copy each": block_by_block,
    "scattered blocks, one batch": batched,
    "pageable to device": to_device_pageable,
    "device to pageable": to_host_pageable,
    "device to device": on_the_device,
    "product": products,
}


def facts() -> dict[str, Any]:
    """The machine and its link to the GPU."""
    query = "--query-gpu=pcie.link.gen.current,pcie.link.width.current,clocks.max.sm"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        link = done.stdout.strip()
    except OSError:
        link = ""
    return {**machine.describe(), "link_generation_width_clock": link}


def measure(file: CellFile, name: str, work: Callable[[], dict[str, Any]]) -> bool:
    """One cell. False when it failed."""
    key = f"device/{name}"
    if file.has(key):
        return True
    began = time.monotonic()
    try:
        values = work()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        file.failed(key, reason, traceback.format_exc(), time.monotonic() - began)
        print(f"{name}: {reason}", flush=True)
        return False
    file.add(key, {"name": name, **values}, time.monotonic() - began)
    print(f"{name}: {values}", flush=True)
    return True


def rates(file: CellFile, size: int) -> list[bool]:
    """All rates, with buffers of `size` bytes that are gone afterwards."""
    bench = Bench(size)
    try:
        return [measure(file, name, partial(work, bench)) for name, work in COPIES.items()]
    finally:
        bench.copy_stream.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=Path, help="keep every rate in this file")
    parser.add_argument("--rehearse", action="store_true", help="small buffers, for a CPU")
    args = parser.parse_args()
    file = CellFile(args.cells, "device")
    good = [measure(file, "machine", facts)]
    good += rates(file, 16 * MIB if args.rehearse else 2 * GIB)
    sizes = (0.01, 0.02) if args.rehearse else PINNED_GIB  # the slowest last
    good += [measure(file, f"pin {gib:g} GiB", partial(pin, gib)) for gib in sizes]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
