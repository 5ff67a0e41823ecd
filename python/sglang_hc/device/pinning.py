"""Host memory that the GPU reads and writes by itself: pages taken in parallel, then registered.

The system hands out a page of the host pool when it is first touched. One `cudaHostRegister` for
the whole pool would touch the pages one by one on one thread, which takes tens of seconds for tens
of gigabytes, and it could only fail as a whole. So several threads take the pages first, and the
memory is registered in pieces.

A copy must not cross the border of two registrations. Pieces consist of whole units (slots of the
host pool), and `whole` cuts a copy of several units at such borders.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sglang_hc.errors import ConfigError

PIECE_BYTES = 2 << 30
"""About the bytes of one registration; a piece consists of whole units and whole pages."""

TAKEN_BYTES = 256 << 20
"""Bytes whose pages one thread takes at a time."""

THREADS = 8

MADV_POPULATE_WRITE = 23
"""Linux 5.14: take the pages of a range for writing, without changing their content."""

Populate = Callable[[int, int], None]
"""(address, bytes). Raises OSError."""


class PinnedMemory:
    """What this process has registered with CUDA: one object for all copy streams of a device."""

    def __init__(self, runtime: Any, populate: Populate | None = None) -> None:
        """runtime: has cudaHostRegister and cudaHostUnregister."""
        self._runtime = runtime
        self._populate = populate or take_pages
        self._registered: list[tuple[int, Any]] = []
        """Address, and what keeps the memory alive."""
        self._borders: list[int] = []
        """Addresses where one registration ends and the next one of the same buffer begins."""

    def pin(self, buffer: Any, unit: int | None = None) -> None:
        """Register a buffer (any object with the buffer protocol) that begins on a page.

        unit: no copy crosses a multiple of so many bytes, counted from the first byte. None: copies
        may cross anything, so the buffer is registered as a whole. Raises ConfigError with the
        remedy when memory cannot be taken or locked; then nothing of the buffer stays registered.
        """
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        address, size = tensor.data_ptr(), tensor.numel()
        step = size if unit is None else piece_bytes(unit)
        pieces = [(address + at, min(step, size - at)) for at in range(0, size, step)]
        before = len(self._registered)
        try:
            self._take(pieces)
            for start, count in pieces:
                status = int(self._runtime.cudaHostRegister(start, count, 0))
                if status != 0:
                    raise OSError(f"cudaHostRegister of {count} bytes: CUDA error {status}")
                self._registered.append((start, tensor))
        except OSError as error:
            self._release(before)
            raise ConfigError(
                f"{size / (1 << 30):.3g} GiB of host memory cannot be locked for the GPU ({error}):"
                " lower --hc-host-size-gb, or raise the limit of locked memory (ulimit -l) and what"
                " the container may use"
            ) from None
        self._borders = sorted([*self._borders, *(start for start, _ in pieces[1:])])

    def whole(self, rows: torch.Tensor) -> Iterator[slice]:
        """Slices of (n, bytes) host rows, in order, each within one registration.

        A single row is never cut, because it lies within a unit. Rows elsewhere are one slice.
        """
        first, count, stride = rows.data_ptr(), rows.shape[0], rows.stride(0)
        begin = 0
        at = bisect_right(self._borders, first)
        while count > 1 and at < len(self._borders):
            border = self._borders[at]
            stop = -(-(border - first) // stride)
            if stop >= count:
                break
            if stop > begin:
                yield slice(begin, stop)
                begin = stop
            at += 1
        yield slice(begin, count)

    def release(self) -> None:
        """Unregister everything. No copy may be under way."""
        self._release(0)
        self._borders = []

    def _take(self, pieces: list[tuple[int, int]]) -> None:
        parts = [
            (start + at, min(TAKEN_BYTES, size - at))
            for start, size in pieces
            for at in range(0, size, TAKEN_BYTES)
        ]
        threads = min(THREADS, os.cpu_count() or 1, len(parts))
        with ThreadPoolExecutor(threads, thread_name_prefix="hc-pin") as pool:
            for _ in pool.map(lambda part: self._populate(*part), parts):
                pass

    def _release(self, keep: int) -> None:
        while len(self._registered) > keep:
            start, _ = self._registered.pop()
            self._runtime.cudaHostUnregister(start)


def piece_bytes(unit: int) -> int:
    """Bytes of a registration: about `PIECE_BYTES`, and at least one whole unit and page."""
    least = math.lcm(unit, mmap.PAGESIZE)
    return max(1, PIECE_BYTES // least) * least


def take_pages(address: int, size: int) -> None:
    """Have the system hand out all pages of a range; their content stays. Raises OSError.

    A system that cannot do this (before Linux 5.14) hands them out during the registration.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(address, size, MADV_POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:
        raise OSError(number, f"taking {size} bytes of memory: {os.strerror(number)}")
