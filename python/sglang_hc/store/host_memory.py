"""The memory that blocks live in and pass through: host pool and snapshots in one piece."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from sglang_hc.forms import BlockLayout
from sglang_hc.store.host_pool import Bytes, HostPool, whole_pages


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


def mapped(size: int) -> mmap.mmap:
    """Memory of so many bytes at least, from a page on.

    Pages are taken from the system as they are first written; huge ones where the system gives
    them, because O_DIRECT and CUDA handle memory by the page. None of it is in a core dump, and no
    forked process has it: that would move pages away from under reads by O_DIRECT.
    """
    mapping = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    mapping.madvise(mmap.MADV_DONTDUMP)  # state of all tenants, and as large as the machine
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


class HostMemory:
    """A host pool over one mapping, and snapshots: rows of several forward passes on their way into
    slots (HCache section 4.2.2)."""

    def __init__(self, spec: MemorySpec) -> None:
        self.spec = spec
        self._rest = memoryview(mapped(spec.bytes))
        pool_bytes = spec.num_slots * spec.layout.slot_bytes
        self.pool = HostPool(spec.layout, spec.num_slots, self._take(pool_bytes))
        self.snapshots = [self._snapshot(spec.snapshot_shape) for _ in range(spec.snapshots)]
        """By the number that operations name."""

    def _snapshot(self, shape: tuple[int, int, int]) -> Bytes:
        return np.frombuffer(self._take(math.prod(shape)), dtype=np.uint8).reshape(shape)

    def _take(self, size: int) -> memoryview:
        piece, self._rest = self._rest[:size], self._rest[whole_pages(size) :]
        return piece
