"""The memory that blocks live in and pass through, in one piece that two processes can map.

The host pool and the snapshots follow from a `MemorySpec` alone, so a process that knows the
specification and has the memory file's descriptor sees the same bytes at the same places.
"""

from __future__ import annotations

import math
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_hc.forms import BlockLayout
from sglang_hc.store.host_pool import Bytes, HostPool, whole_pages

PAGE_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""Whether Linux gives huge pages to memory that processes share: `never` on most systems."""


@dataclass(frozen=True)
class MemorySpec:
    """Sizes. snapshots: buffers of so many rows of hidden states each."""

    layout: BlockLayout
    num_slots: int
    snapshot_rows: int
    snapshots: int

    @property
    def snapshot_shape(self) -> tuple[int, int, int]:
        """Of one buffer: (hidden layers, rows, hidden_bytes)."""
        return self.layout.plan.hidden, self.snapshot_rows, self.layout.shape.hidden_bytes

    @property
    def bytes(self) -> int:
        """Size of all of it, every array on a page of its own."""
        pool = whole_pages(self.num_slots * self.layout.slot_bytes)
        return pool + self.snapshots * whole_pages(math.prod(self.snapshot_shape))


class HostMemory:
    """A host pool over one mapping, and snapshots: rows of several forward passes on their way into
    slots (HCache section 4.2.2).

    descriptor: of a memory file of `spec.bytes` bytes (`memory_file`); None for memory that only
    this process sees. Pages are taken from the system as they are first written; huge ones where
    the system gives them, because O_DIRECT and CUDA handle memory by the page. None of it is in a
    core dump.
    """

    def __init__(self, spec: MemorySpec, descriptor: int | None = None) -> None:
        self.spec = spec
        size = max(spec.bytes, mmap.PAGESIZE)
        if descriptor is None:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
        else:
            mapping = mmap.mmap(descriptor, size)
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping.madvise(mmap.MADV_DONTDUMP)  # state of all tenants, and as large as the machine
        self._rest = memoryview(mapping)
        pool_bytes = spec.num_slots * spec.layout.slot_bytes
        self.pool = HostPool(spec.layout, spec.num_slots, self._take(pool_bytes))
        self.snapshots = [self._snapshot(spec.snapshot_shape) for _ in range(spec.snapshots)]
        """By the number that operations name."""

    def _snapshot(self, shape: tuple[int, int, int]) -> Bytes:
        return np.frombuffer(self._take(math.prod(shape)), dtype=np.uint8).reshape(shape)

    def _take(self, size: int) -> memoryview:
        piece, self._rest = self._rest[:size], self._rest[whole_pages(size) :]
        return piece


def memory_file(spec: MemorySpec) -> int:
    """Descriptor of a new memory file for `HostMemory`. It has no name and goes with its last
    user. Raises OSError."""
    descriptor = os.memfd_create("sglang-hc", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, max(spec.bytes, mmap.PAGESIZE))
    return descriptor


def page_setting(path: Path = PAGE_SETTING) -> str:
    """The setting that is in force, for example `never`; empty where the system has none."""
    try:
        _, _, rest = path.read_text().partition("[")
    except OSError:
        return ""
    return rest.partition("]")[0]
