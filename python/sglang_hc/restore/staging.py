"""Device memory that chunks pass through on their way into the KV pool, and what goes into it.

A restoration of any length and depth uses the same few frames in turn, so its memory does not grow
with tokens or layers. Rows that lie in adjacent host slots travel as one copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sglang_hc.device.copy_stream import CopyStream, Event
from sglang_hc.device.ranges import Ranges
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, Form, StateShape
from sglang_hc.store.host_pool import HostPool

CUDA_FRAMES = (8, 32 << 20)
"""Frames and bytes of each: two layers of 16K tokens of a 7B multi-head model as hidden states,
which is what double buffering holds for the longest histories of HCache's evaluation."""

FEW_RUNS = 3
"""So many runs of a piece travel as a copy each, more of them as one batch of all their slots: a
history in adjacent slots has up to three, its first and last blocks being parts of one."""

CPU_FRAMES = (2, 4 << 20)
"""Copies do not run beside the computation there: two frames small enough for the caches."""


class HostSpan(NamedTuple):
    """`rows` consecutive rows of one host slot."""

    slot: int
    row: int
    rows: int


class Run(NamedTuple):
    """Rows [row, row + rows) of each of `slots` adjacent host slots, the first being `slot`.

    More than one slot only with all rows of each.
    """

    slot: int
    slots: int
    row: int
    rows: int


@dataclass(frozen=True)
class Piece:
    """Rows [first, first + rows) of a sequence of spans, as copies."""

    first: int
    rows: int
    runs: tuple[Run, ...]
    _ranges: dict[tuple[int, int], Ranges] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def ranges(self, slot_bytes: int, row_bytes: int) -> Ranges:
        """One range per host slot, to consecutive rows of a target. slot_bytes: from one slot to
        the next. Made once for all layers, which differ in the first byte only."""
        key = slot_bytes, row_bytes
        if key not in self._ranges:
            slot, slots, row, rows = np.array(self.runs, dtype=np.int64).T
            first = np.repeat(np.cumsum(slots) - slots, slots)
            index = np.arange(first.size) - first
            sources = (np.repeat(slot, slots) + index) * slot_bytes
            sizes = np.repeat(rows, slots) * row_bytes
            targets = np.cumsum(sizes) - sizes
            made = Ranges(sources + np.repeat(row, slots) * row_bytes, targets, sizes)
            self._ranges[key] = made
        return self._ranges[key]


def cut(spans: Sequence[HostSpan], limit: int) -> Iterator[Piece]:
    """Pieces of at most `limit` rows that cover `spans` in order. `limit` is at least a block."""
    if limit < BLOCK_TOKENS:
        raise ValueError(f"a piece holds at least one block of {BLOCK_TOKENS} rows, got {limit}")
    first, rows, runs = 0, 0, list[Run]()
    for span in spans:
        if rows + span.rows > limit:
            yield Piece(first, rows, tuple(runs))
            first, rows, runs = first + rows, 0, []
        rows += span.rows
        last = runs[-1] if runs else None
        whole = span.rows == BLOCK_TOKENS
        if last and whole and last.rows == BLOCK_TOKENS and last.slot + last.slots == span.slot:
            runs[-1] = last._replace(slots=last.slots + 1)
        else:
            runs.append(Run(span.slot, 1, span.row, span.rows))
    if rows:
        yield Piece(first, rows, tuple(runs))


class LayerSource:
    """Each layer's part of the host pool, whatever its form."""

    def __init__(self, pool: HostPool) -> None:
        layout = pool.layout
        self._layout = layout
        self._hidden = torch.from_numpy(pool.hidden)
        self._kv = [torch.from_numpy(part) for part in pool.kv]
        self._hidden_widths = [layout.shape.hidden_bytes]
        self._kv_widths = list(layout.shape.kv_parts)

    def parts(self, layer: int) -> list[torch.Tensor]:
        """(slots, BLOCK_TOKENS, row bytes) uint8 per part of the layer's form: one, or K and V."""
        plan = self._layout.plan
        if self._layout.form(layer) is Form.HIDDEN:
            return [self._hidden[:, layer - plan.recompute]]
        return [part[:, layer - plan.recompute - plan.hidden] for part in self._kv]

    def widths(self, layer: int) -> list[int]:
        """Row bytes of each part."""
        hidden = self._layout.form(layer) is Form.HIDDEN
        return self._hidden_widths if hidden else self._kv_widths


def copy_piece(
    copy_stream: CopyStream, piece: Piece, source: torch.Tensor, target: torch.Tensor
) -> None:
    """Enqueue the rows of a piece from one layer of the host pool to consecutive rows of `target`.

    Few runs are a two-dimensional copy each. Many, of slots that lie scattered, are one batch where
    the copy stream has that, so the time of this thread does not grow with their number.
    source: (slots, BLOCK_TOKENS, row bytes) uint8. target: (rows, row bytes) uint8, contiguous.
    """
    width = target.shape[1]
    if copy_stream.batches and len(piece.runs) > FEW_RUNS:
        copy_stream.copy_ranges(target, source, piece.ranges(source.stride(0), width))
        return
    at = 0
    for run in piece.runs:
        count = run.slots * run.rows
        rows = source[run.slot : run.slot + run.slots, run.row : run.row + run.rows]
        copy_stream.copy(
            target[at : at + count].view(run.slots, run.rows * width),
            rows.view(run.slots, run.rows * width),
        )
        at += count


def frames_of(shape: StateShape, device: torch.device) -> tuple[int, int]:
    """Number and bytes of the frames by default; each holds a block of either form at least."""
    frames, size = CUDA_FRAMES if device.type == "cuda" else CPU_FRAMES
    return frames, max(size, BLOCK_TOKENS * max(shape.hidden_bytes, shape.kv_bytes))


class StagingRing:
    """Frames of one size on the device, taken in turn by one restore pass after the other.

    A frame comes back with a point in the compute work behind its last reader; the copies that fill
    it next start after that point, and need not wait for anything else that computes.
    """

    def __init__(
        self, frames: int, frame_bytes: int, device: torch.device, copy_stream: CopyStream
    ) -> None:
        self.frame_bytes = frame_bytes
        self._copy_stream = copy_stream
        self._free: deque[tuple[torch.Tensor, Event | None]] = deque(
            (torch.empty(frame_bytes, dtype=torch.uint8, device=device), None)
            for _ in range(frames)
        )
        self._finish_last: Callable[[], None] = _nothing

    @classmethod
    def sized_for(
        cls, layout: BlockLayout, device: torch.device, copy_stream: CopyStream
    ) -> StagingRing:
        """The default for a device."""
        return cls(*frames_of(layout.shape, device), device, copy_stream)

    def claim(self, finish: Callable[[], None]) -> None:
        """A pass begins to use the frames. One that is not over is finished first, by the `finish`
        it gave: two passes that each hold some of the frames could both come to a stop."""
        self._finish_last()
        self._finish_last = finish

    def release(self, finish: Callable[[], None]) -> None:
        """The pass that gave `finish` is over. The ring forgets it: each holding the other would
        keep the frames' memory until the next run of the garbage collector."""
        if self._finish_last == finish:
            self._finish_last = _nothing

    def rows(self, row_bytes: int) -> int:
        """Rows of a size that one frame holds."""
        return self.frame_bytes // row_bytes

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def free(self) -> list[torch.Tensor]:
        """The frames that no pass has."""
        return [frame for frame, _ in self._free]

    def take(self) -> torch.Tensor:
        """A frame, (frame_bytes,) uint8, for copies enqueued from now on. IndexError: none left."""
        frame, read = self._free.popleft()
        if read is not None:
            self._copy_stream.after(read)
        return frame

    def give_back(self, frame: torch.Tensor) -> None:
        """All compute work that reads the frame has been submitted."""
        self._free.append((frame, self._copy_stream.computed()))

    def give_back_unread(self, frame: torch.Tensor) -> None:
        """No compute work has read what was copied to the frame since it was taken."""
        self._free.append((frame, None))


def carve(frame: torch.Tensor, rows: int, widths: Sequence[int]) -> list[torch.Tensor]:
    """(rows, width) views of a frame, one after the other."""
    views, at = [], 0
    for width in widths:
        views.append(frame[at : at + rows * width].view(rows, width))
        at += rows * width
    return views


def _nothing() -> None:
    return None
