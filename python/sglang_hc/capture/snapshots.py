"""Two-stage saving (HCache section 4.2.2): rows leave the device in batches, and another thread
scatters them into slots.

`Snapshots` gathers the rows of many passes in one staging buffer on the device and copies it to the
host at once. `store.scatter_queue` hands the host copy to the I/O executor, which scatters the rows
into slots, and knows when all bytes of a slot are in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_hc.device.copy_stream import CopyStream
from sglang_hc.store.executor import RowSpan, ScatterRows
from sglang_hc.store.host_pool import Bytes
from sglang_hc.store.scatter_queue import ScatterQueue

Fill = Callable[[list[torch.Tensor], int, int, int], None]
"""fill(targets, at, first, count): source rows [first, first + count) to rows [at, at + count) of
each target, of shape (layers, capacity, row bytes), by work on the compute stream."""


@dataclass(eq=False)
class _Snapshot:
    """A snapshot and its staging on the device. Without a device they are the same memory."""

    index: int
    host: torch.Tensor
    device: torch.Tensor


class Snapshots:
    """Hidden states gathered until they are worth one copy.

    Not thread-safe. `capacity` rows each. Rows that find no free snapshot are refused: a slow
    executor loses rows, but the scheduler never waits for it.
    """

    def __init__(
        self,
        buffers: Sequence[Bytes],
        staging: torch.Tensor | None,
        copy_stream: CopyStream,
        scatters: ScatterQueue,
    ) -> None:
        """buffers: `HostMemory.snapshots`, by the numbers that the executor knows.

        staging: memory of the device, uint8, as large as all buffers; None where the device has no
        memory of its own.
        """
        self._copy_stream = copy_stream
        self._scatters = scatters
        self.capacity: int = buffers[0].shape[1]
        self.free: list[_Snapshot] = []
        for index, buffer in enumerate(buffers):
            host = device = torch.from_numpy(buffer)
            if staging is not None:
                size = host.numel()
                device = staging[index * size : (index + 1) * size].view(host.shape)
                copy_stream.pin(buffer)
            self.free.append(_Snapshot(index, host, device))
        self._current: _Snapshot | None = None
        self._rows = 0
        self._spans: list[RowSpan] = []

    @property
    def room(self) -> int:
        """Rows that can be added now without waiting."""
        free = len(self.free) * self.capacity
        return free + (self.capacity - self._rows if self._current is not None else 0)

    def add(self, low: int, stop: int, fill: Fill, spans: Sequence[RowSpan]) -> None:
        """Take the source rows [low, stop), which `fill` writes; `spans` name some of them. The
        caller checked `room`."""
        while low < stop:
            if self._current is None:
                self._current, self._rows = self.free.pop(), 0
            count = min(stop - low, self.capacity - self._rows)
            fill([self._current.device], self._rows, low, count)
            self._spans += shifted(spans, low, low + count, self._rows - low)
            self._rows += count
            low += count
            if self._rows == self.capacity:
                self.flush()

    def flush(self) -> None:
        """Have what was gathered scattered."""
        snapshot = self._current
        if snapshot is None:
            return
        self._current = None
        if snapshot.device is not snapshot.host:
            self._copy_stream.after(self._copy_stream.computed())
            width = self._rows * snapshot.host.shape[2]
            host, device = snapshot.host.flatten(1), snapshot.device.flatten(1)
            self._copy_stream.copy(host[:, :width], device[:, :width])
        operation = ScatterRows(snapshot.index, tuple(self._spans))
        self._spans = []
        scattered = self._scatters.submit(operation, after=self._copy_stream.record())
        scattered.then(lambda: self.free.append(snapshot))


def shifted(spans: Sequence[RowSpan], low: int, high: int, shift: int) -> list[RowSpan]:
    """Parts of `spans` whose source rows lie in [low, high), with source rows moved by `shift`."""
    parts = []
    for source, slot, slot_row, rows in spans:
        start, stop = max(source, low), min(source + rows, high)
        if start < stop:
            parts.append(RowSpan(start + shift, slot, slot_row + start - source, stop - start))
    return parts
