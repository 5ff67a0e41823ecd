"""Host memory that the GPU reads and writes by itself: pages taken in parallel, then registered.

The system hands out a page of the host pool when it is first touched. `cudaHostRegister` would
touch them one by one on one thread, which takes tens of seconds for tens of gigabytes. So several
threads take the pages first.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sglang_hc.errors import ConfigError

logger = logging.getLogger(__name__)

TAKEN_BYTES = 256 << 20
"""Bytes whose pages one thread takes at a time."""

THREADS = 8

MADV_POPULATE_WRITE = 23
"""Linux 5.14: take the pages of a range for writing, without changing their content."""


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


def give_back_pinned() -> None:
    """Give freed memory that torch locked back to the system: it keeps such memory for ever, in
    blocks of powers of two."""
    if torch.cuda.is_available():
        torch._C._host_emptyCache()


class PinnedMemory:
    """What this process has registered with CUDA: one object for all copy streams of a device.

    When it goes, so do the registrations: the system may map other memory to the same addresses,
    which CUDA would refuse as registered already.
    """

    def __init__(self, runtime: Any, take: Callable[[int, int], None] = take_pages) -> None:
        """runtime: has cudaHostRegister and cudaHostUnregister. take: see `take_pages`."""
        self._runtime = runtime
        self._take = take
        self._registered: list[tuple[int, torch.Tensor]] = []
        """Address, and what keeps the memory alive."""
        # Not at exit: the memory ends with the process, and CUDA may have ended before.
        weakref.finalize(self, _unregister, runtime, self._registered).atexit = False

    def pin(self, buffer: Any) -> None:
        """Register a buffer (any object with the buffer protocol) that begins on a page. Raises
        ConfigError with the remedy when memory cannot be taken or locked."""
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        address, size = tensor.data_ptr(), tensor.numel()
        # Before: hundreds of GiB take minutes, in which the server says nothing else.
        logger.info("sglang-hc: locking %.3g GiB of host memory for the GPU", size / (1 << 30))
        try:
            self._take_all(address, size)
            status = int(self._runtime.cudaHostRegister(address, size, 0))
            if status != 0:
                raise OSError(f"cudaHostRegister of {size} bytes: CUDA error {status}")
        except OSError as error:
            raise ConfigError(
                f"{size / (1 << 30):.3g} GiB of host memory cannot be locked for the GPU ({error}):"
                " lower --hc-host-size-gb, or raise the limit of locked memory (ulimit -l) and what"
                " the container may use"
            ) from None
        self._registered.append((address, tensor))

    def release(self) -> None:
        """Unregister everything. No copy may be under way."""
        _unregister(self._runtime, self._registered)

    def _take_all(self, address: int, size: int) -> None:
        starts = range(0, size, TAKEN_BYTES)
        threads = min(THREADS, os.cpu_count() or 1, len(starts))
        with ThreadPoolExecutor(threads, thread_name_prefix="hc-pin") as pool:
            parts = (min(TAKEN_BYTES, size - at) for at in starts)
            for _ in pool.map(self._take, (address + at for at in starts), parts):
                pass


def _unregister(runtime: Any, registered: list[tuple[int, torch.Tensor]]) -> None:
    while registered:
        address, _ = registered[-1]
        runtime.cudaHostUnregister(address)
        registered.pop()  # now the memory may go
