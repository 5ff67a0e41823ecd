"""The host pool's bytes: one slot per block, laid out by `forms.BlockLayout`.

Bytes only; who owns a slot is `tree.host_tier`'s business. Views are numpy arrays of uint8 over one
buffer.
"""

from __future__ import annotations

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

    def view(self, index: int) -> memoryview:
        """The same for calls of the system."""
        start = index * self.layout.slot_bytes
        return memoryview(self.buffer)[start : start + self.layout.slot_bytes]

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


def whole_pages(size: int) -> int:
    """`size` rounded up to pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
