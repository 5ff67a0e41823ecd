"""Rows that go straight from the device into their slots, without a snapshot.

A slot keeps the rows of a layer in the order of their positions, as a pass leaves them. So one
strided copy moves the rows of one block in all layers. That is worth it for the many rows of a
prefill; the single rows of decode steps are gathered first (`snapshots.Snapshots`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_hc.capture.snapshots import Fill, shifted
from sglang_hc.device.copy_stream import CopyStream
from sglang_hc.store.executor import RowSpan
from sglang_hc.store.host_pool import Bytes
from sglang_hc.store.scatter_queue import Event, ScatterQueue

_PIECES = 4
"""The ring is handed out in this many parts, so that copies run beside the gathering."""


class _Lent(NamedTuple):
    start: int
    stop: int
    copied: Event


class DeviceRing:
    """Device memory that rows pass through on their way to the host, handed out in turns.

    The device itself keeps the order: work that fills a part again starts after the copy out of it.
    The host never waits for this. The compute stream waits if rows are made faster than copied.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """size: bytes. Raises torch's out of memory, a RuntimeError."""
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._lent: deque[_Lent] = deque()
        self._taken = (0, 0)

    def rows(self, row_bytes: int) -> int:
        """Rows to hand out at a time. Raises ValueError if the ring is smaller than one row."""
        if row_bytes > self.memory.numel():
            raise ValueError(f"a row of {row_bytes} bytes, a ring of {self.memory.numel()}")
        return max(1, self.memory.numel() // _PIECES // row_bytes)

    def take(
        self, shapes: Sequence[tuple[int, int, int]], copy_stream: CopyStream
    ) -> list[torch.Tensor]:
        """Tensors of these shapes, for compute work submitted from now on, until `give`."""
        total = sum(_aligned(math.prod(shape)) for shape in shapes)
        head = self._taken[1]
        start = head if head + total <= self.memory.numel() else 0
        if start + total > self.memory.numel():
            raise ValueError(f"{total} bytes, a ring of {self.memory.numel()}")
        kept: deque[_Lent] = deque()
        for lent in self._lent:
            if lent.start < start + total and start < lent.stop:
                copy_stream.before_compute(lent.copied)
            elif not lent.copied.done():
                kept.append(lent)
        self._lent = kept
        self._taken = start, start + total
        return tensors_of(self.memory[start:], shapes)

    def give(self, copied: Event) -> None:
        """What was taken last may be handed out again behind `copied`."""
        self._lent.append(_Lent(*self._taken, copied))


class DirectRows:
    """Rows of one kind (hidden states, or KV) on their way into the slots of a host pool.

    Takes any number of rows at any time. Rows may go this way only while no scatter that is under
    way writes the same places.
    """

    def __init__(
        self,
        slots: Sequence[Bytes],
        copy_stream: CopyStream,
        scatters: ScatterQueue,
        ring: DeviceRing | None,
    ) -> None:
        """slots: `HostPool.hidden`, or the parts of `HostPool.kv`. ring: None where the device has
        no memory of its own."""
        self._slots = [torch.from_numpy(array) for array in slots]
        self._copy_stream = copy_stream
        self._scatters = scatters
        self.ring = ring
        row_bytes = sum(t.shape[1] * t.shape[3] for t in self._slots)
        self._piece = 0 if ring is None else ring.rows(row_bytes)

    def add(self, low: int, stop: int, fill: Fill, spans: Sequence[RowSpan]) -> None:
        """Take the source rows [low, stop), which `fill` writes; `spans` name some of them."""
        if self.ring is None:
            for source, slot, slot_row, count in spans:
                fill([slots[slot] for slots in self._slots], slot_row, source, count)
            return
        try:
            for first in range(low, stop, self._piece):
                self._copy_piece(self.ring, first, min(self._piece, stop - first), fill, spans)
        finally:  # a slot that copies go to is waited for after an error as well
            self._scatters.pass_point(self._copy_stream.record())

    def _copy_piece(
        self, ring: DeviceRing, first: int, count: int, fill: Fill, spans: Sequence[RowSpan]
    ) -> None:
        """Take the source rows [first, first + count) through the ring."""
        shapes = [(t.shape[1], count, t.shape[3]) for t in self._slots]
        staged = ring.take(shapes, self._copy_stream)
        fill(staged, 0, first, count)
        self._copy_stream.after(self._copy_stream.computed())
        for source, slot, row, length in shifted(spans, first, first + count, -first):
            for slots, rows in zip(self._slots, staged, strict=True):
                self._copy_stream.copy(
                    slots[slot, :, row : row + length].flatten(1),
                    rows[:, source : source + length].flatten(1),
                )
        ring.give(self._copy_stream.record())


def tensors_of(memory: torch.Tensor, shapes: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Consecutive uint8 tensors in `memory`, as `DeviceRing` hands them out."""
    tensors, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        tensors.append(memory[start : start + size].view(shape))
        start += _aligned(size)
    return tensors


def _aligned(size: int) -> int:
    """The size rounded up, so that every part begins at a whole word."""
    return -(-size // 16) * 16
