"""The bytes of host memory's slots: of blocks, laid out by `forms.BlockLayout`, and of end parts,
laid out by `forms.EndLayout`.

Bytes only; who owns a slot is `tree.host_tier`'s and `tree.ends`'s business. Views are numpy arrays
of uint8 over one buffer.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, EndLayout

Bytes = npt.NDArray[np.uint8]

Buffer = memoryview | mmap.mmap


class SlotPool:
    """`num_slots` slots of `slot_bytes` bytes in one page-aligned buffer."""

    def __init__(self, slot_bytes: int, num_slots: int, buffer: Buffer | None = None) -> None:
        self.num_slots = num_slots
        self._slot_bytes = slot_bytes
        size = num_slots * slot_bytes
        # Anonymous pages are taken from the system as they are first written, not here.
        self.buffer = mmap.mmap(-1, size) if buffer is None else buffer
        self.bytes: Bytes = np.frombuffer(self.buffer, dtype=np.uint8, count=size).reshape(
            num_slots, slot_bytes
        )

    def slot(self, index: int) -> Bytes:
        """All bytes of one slot, shape (slot_bytes,)."""
        slot: Bytes = self.bytes[index]
        return slot

    def view(self, index: int) -> memoryview:
        """The same for calls of the system."""
        start = index * self._slot_bytes
        return memoryview(self.buffer)[start : start + self._slot_bytes]

    def _rows(self, offset: int, layers: int, stride: int, rows: int, row_bytes: int) -> Bytes:
        """(slots, layers, rows, row_bytes) view of chunks that begin at `offset` of each slot."""
        return np.lib.stride_tricks.as_strided(
            self.bytes[:, offset:],
            shape=(self.num_slots, layers, rows, row_bytes),
            strides=(self._slot_bytes, stride, row_bytes, 1),
        )


class HostPool(SlotPool):
    """Slots of blocks.

    hidden: (slots, hidden layers, BLOCK_TOKENS, hidden_bytes) uint8 view.
    kv: one (slots, KV layers, BLOCK_TOKENS, part bytes) uint8 view per part of a KV row.
    """

    def __init__(self, layout: BlockLayout, num_slots: int, buffer: Buffer | None = None) -> None:
        super().__init__(layout.slot_bytes, num_slots, buffer)
        self.layout = layout
        shape, plan, stride = layout.shape, layout.plan, layout.hidden_chunk_bytes
        self.hidden = self._rows(0, plan.hidden, stride, BLOCK_TOKENS, shape.hidden_bytes)
        base, layers = plan.hidden * stride, len(layout.kv_layers)
        self.kv: list[Bytes] = []
        for part in shape.kv_parts:
            self.kv.append(self._rows(base, layers, layout.kv_chunk_bytes, BLOCK_TOKENS, part))
            base += BLOCK_TOKENS * part

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the hidden states of the first `rows` tokens from one slot to another.

        KV is not copied: whoever publishes the other slot reads it from the device pool, and its
        rows may be on their way there already.
        """
        self.hidden[target, :, :rows] = self.hidden[source, :, :rows]


class EndPool(SlotPool):
    """Slots of end parts.

    window: one (slots, WINDOW layers, BLOCK_TOKENS, part bytes) uint8 view per part of a row.
    state: one (slots, STATE layers, 1, part bytes) uint8 view per part of a layer's state.
    """

    def __init__(self, layout: EndLayout, num_slots: int, buffer: Buffer | None = None) -> None:
        super().__init__(layout.slot_bytes, num_slots, buffer)
        self.layout = layout
        base, layers = 0, len(layout.window.layers)
        self.window: list[Bytes] = []
        for part in layout.window.parts:
            self.window.append(
                self._rows(base, layers, layout.window_chunk_bytes, BLOCK_TOKENS, part)
            )
            base += BLOCK_TOKENS * part
        layers, stride = len(layout.state.layers), layout.state_chunk_bytes
        starts = [layout.window_bytes + offset for offset in layout.state_offsets]
        self.state = [
            self._rows(start, layers, stride, 1, part)
            for start, part in zip(starts, layout.state.parts, strict=False)
        ]


def whole_pages(size: int) -> int:
    """`size` rounded up to pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
