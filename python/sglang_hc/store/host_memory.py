"""The memory that blocks live in and pass through: host pool, end parts, snapshots in one piece."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout
from sglang_hc.store.host_pool import Bytes, EndPool, HostPool, whole_pages


@dataclass(frozen=True)
class MemorySpec:
    """Sizes. snapshots: buffers of so many rows of hidden states each. end_slots: of end parts; 0
    where the layout has none."""

    layout: BlockLayout
    num_slots: int
    snapshot_rows: int
    snapshots: int
    end_slots: int = 0

    @property
    def snapshot_shape(self) -> tuple[int, int, int]:
        """Of one buffer: (hidden layers, rows, hidden_bytes)."""
        return self.layout.plan.hidden, self.snapshot_rows, self.layout.shape.hidden_bytes

    @property
    def bytes(self) -> int:
        """Size of all of it, every array on a page of its own."""
        pool = whole_pages(self.num_slots * self.layout.slot_bytes)
        snapshots = self.snapshots * whole_pages(math.prod(self.snapshot_shape))
        return pool + whole_pages(self.end_bytes) + snapshots

    @property
    def end_bytes(self) -> int:
        """Size of the end parts."""
        return self.end_slots * self.layout.ends.slot_bytes if self.layout.ends is not None else 0


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
    slots (HCache section 4.2.2). ends: the pool of end parts; None without."""

    def __init__(self, spec: MemorySpec) -> None:
        self.spec = spec
        self._rest = memoryview(mapped(spec.bytes))
        pool_bytes = spec.num_slots * spec.layout.slot_bytes
        self.pool = HostPool(spec.layout, spec.num_slots, self._take(pool_bytes))
        self.ends: EndPool | None = None
        if spec.layout.ends is not None and spec.end_slots:
            self.ends = EndPool(spec.layout.ends, spec.end_slots, self._take(spec.end_bytes))
        self.snapshots = [self._snapshot(spec.snapshot_shape) for _ in range(spec.snapshots)]
        """By the number that operations name."""

    def _snapshot(self, shape: tuple[int, int, int]) -> Bytes:
        return np.frombuffer(self._take(math.prod(shape)), dtype=np.uint8).reshape(shape)

    def _take(self, size: int) -> memoryview:
        piece, self._rest = self._rest[:size], self._rest[whole_pages(size) :]
        return piece


TOKENS_PER_END = 2048
"""Where host memory is divided, one end for so many tokens: a conversation needs its last end, and
some more where its paths branch."""

MOST_FOR_ENDS = 1 / 3
"""Share of host memory that ends take at most: those of recurrent layers, and of long windows, are
as large as the blocks of thousands of tokens, and a block is good for all that comes behind it."""


def least_bytes(layout: BlockLayout) -> int:
    """Of one block, with an end where it needs one."""
    ends = layout.ends
    return layout.slot_bytes + (ends.blocks * ends.slot_bytes if ends is not None else 0)


def divided(size: int, layout: BlockLayout) -> tuple[int, int]:
    """(slots of blocks, slots of end parts) that fit into so many bytes.

    One end for TOKENS_PER_END tokens of blocks, but for MOST_FOR_ENDS of the bytes at most, and at
    least one. No end parts where the layout has none; no blocks where they would not fit.
    """
    if layout.ends is None:
        return size // layout.slot_bytes, 0
    end_bytes = layout.ends.blocks * layout.ends.slot_bytes
    blocks_bytes = TOKENS_PER_END // BLOCK_TOKENS * layout.slot_bytes
    share = min(end_bytes / (end_bytes + blocks_bytes), MOST_FOR_ENDS)
    end_slots = max(int(size * share) // layout.ends.slot_bytes, layout.ends.blocks)
    rest = size - end_slots * layout.ends.slot_bytes
    return max(0, rest // layout.slot_bytes), end_slots
