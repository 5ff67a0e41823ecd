"""The host pool's bytes: one slot per block, laid out by `forms.BlockLayout`.

Bytes only; who owns a slot is `tree.host_tier`'s business. Views are numpy arrays of uint8 over one
buffer, which may be anonymous memory or shared memory.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout

Bytes = npt.NDArray[np.uint8]


class HostPool:
    """`num_slots` slots of `layout.slot_bytes` bytes in one page-aligned buffer.

    hidden: (slots, hidden layers, BLOCK_TOKENS, hidden_bytes) uint8 view.
    kv: one (slots, KV layers, BLOCK_TOKENS, part bytes) uint8 view per part of a KV row.
    """

    def __init__(
        self, layout: BlockLayout, num_slots: int, buffer: memoryview | mmap.mmap | None = None
    ) -> None:
        self.layout = layout
        self.num_slots = num_slots
        size = num_slots * layout.slot_bytes
        # Anonymous pages are taken from the system as they are first written, not here.
        self.buffer = mmap.mmap(-1, size) if buffer is None else buffer
        self.bytes: Bytes = np.frombuffer(self.buffer, dtype=np.uint8, count=size).reshape(
            num_slots, layout.slot_bytes
        )
        shape, plan = layout.shape, layout.plan
        self.hidden = self._rows(0, plan.hidden, layout.hidden_chunk_bytes, shape.hidden_bytes)
        base = plan.hidden * layout.hidden_chunk_bytes
        self.kv: list[Bytes] = []
        for part in shape.kv_parts:
            layers = len(layout.kv_layers)
            self.kv.append(self._rows(base, layers, layout.kv_chunk_bytes, part))
            base += BLOCK_TOKENS * part

    def slot(self, index: int) -> Bytes:
        """All bytes of one slot, shape (slot_bytes,)."""
        slot: Bytes = self.bytes[index]
        return slot

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the hidden states of the first `rows` tokens from one slot to another.

        KV is not copied: whoever publishes the other slot reads it from the device pool, and its
        rows may be on their way there already.
        """
        self.hidden[target, :, :rows] = self.hidden[source, :, :rows]

    def _rows(self, offset: int, layers: int, stride: int, row_bytes: int) -> Bytes:
        return np.lib.stride_tricks.as_strided(
            self.bytes[:, offset:],
            shape=(self.num_slots, layers, BLOCK_TOKENS, row_bytes),
            strides=(self.layout.slot_bytes, stride, row_bytes, 1),
        )


class SnapshotBuffer:
    """Rows of one or several forward passes on their way into slots (HCache section 4.2.2).

    hidden: (hidden layers, capacity, hidden_bytes) uint8. kv: one (KV layers, capacity, part bytes)
    array per part. Each array starts on a page of its own. `ScatterRows` writes rows token by token
    into slots.
    """

    def __init__(
        self,
        layout: BlockLayout,
        capacity: int,
        hidden: bool,
        kv: bool,
        buffer: memoryview | None = None,
    ) -> None:
        """buffer: `size` bytes; anonymous memory by default."""
        self.capacity = capacity
        shapes = _shapes(layout, capacity, hidden, kv)
        if buffer is None:
            size = self.size(layout, capacity, hidden, kv)
            buffer = memoryview(mmap.mmap(-1, max(size, mmap.PAGESIZE)))
        arrays = []
        start = 0
        for shape in shapes:
            count = math.prod(shape)
            array = np.frombuffer(buffer, dtype=np.uint8, count=count, offset=start)
            arrays.append(array.reshape(shape))
            start += whole_pages(count)
        self.hidden: Bytes = arrays[0]
        self.kv: list[Bytes] = arrays[1:]

    @property
    def row_bytes(self) -> int:
        """Of one row of all layers."""
        return sum(array.shape[0] * array.shape[2] for array in (self.hidden, *self.kv))

    @staticmethod
    def size(layout: BlockLayout, capacity: int, hidden: bool, kv: bool) -> int:
        """Bytes of such a buffer."""
        shapes = _shapes(layout, capacity, hidden, kv)
        return sum(whole_pages(math.prod(shape)) for shape in shapes)


def _shapes(
    layout: BlockLayout, capacity: int, hidden: bool, kv: bool
) -> list[tuple[int, int, int]]:
    shape, plan = layout.shape, layout.plan
    layers = len(layout.kv_layers) if kv else 0
    parts = [(layers, capacity, part) for part in shape.kv_parts]
    return [(plan.hidden if hidden else 0, capacity, shape.hidden_bytes), *parts]


def whole_pages(size: int) -> int:
    """`size` rounded up to pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
