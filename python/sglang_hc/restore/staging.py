"""The frames of device memory through which chunks pass on their way into the KV pool.

A restoration of any length uses the same few frames in turn, so its memory does not grow with its
tokens or layers. Rows in adjacent host slots are one copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sglang_hc.device.copy_stream import CopyStream
from sglang_hc.device.cuda_copies import Ranges
from sglang_hc.forms import BLOCK_TOKENS, Form, StateShape
from sglang_hc.store.host_pool import EndPool, HostPool
from sglang_hc.store.scatter_queue import Event

CUDA_FRAMES = (8, 32 << 20)
"""Frames, and the bytes of each. Together they hold two layers of hidden states of 16K tokens of a
7B multi-head model: double buffering for the longest histories of HCache's evaluation."""

FEW_RUNS = 3
"""Up to this many runs of a piece are copied one by one; a piece of more runs is one batched copy.
A history in adjacent slots has up to three runs, because only parts of its first and last blocks
may be needed."""

CPU_FRAMES = (2, 4 << 20)
"""On a CPU copies do not run beside the computation, so two frames that fit into the caches do."""


class HostSpan(NamedTuple):
    """`rows` consecutive rows of one host slot."""

    slot: int
    row: int
    rows: int


class Run(NamedTuple):
    """Rows [row, row + rows) of each of `slots` adjacent host slots from `slot` on.

    A run of several slots has all rows of each.
    """

    slot: int
    slots: int
    row: int
    rows: int


@dataclass(frozen=True)
class Piece:
    """Rows [first, first + rows) of a sequence of spans, and the runs that are copied for them."""

    first: int
    rows: int
    runs: tuple[Run, ...]
    _ranges: dict[tuple[int, int], Ranges] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def ranges(self, slot_bytes: int, row_bytes: int) -> Ranges:
        """One range per host slot, copied to consecutive rows of a target. slot_bytes: distance
        from one slot to the next. Computed once: layers differ in their first byte only."""
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
    """Each layer's part of the host pool in the layer's form. Layers with sliding windows are
    numbered behind the blocks' own."""

    def __init__(self, pool: HostPool, ends: EndPool | None = None) -> None:
        layout = pool.layout
        self._layout = layout
        self._hidden = torch.from_numpy(pool.hidden)
        self._kv = [torch.from_numpy(part) for part in pool.kv]
        self._window = [] if ends is None else [torch.from_numpy(part) for part in ends.window]
        self.first_window = layout.plan.num_layers + layout.draft.count
        """Number of the first layer with a sliding window."""

    def window_layer(self, layer: int) -> int | None:
        """Its number among the layers with sliding windows; None where it is none of them."""
        return layer - self.first_window if layer >= self.first_window else None

    def parts(self, layer: int) -> list[torch.Tensor]:
        """(slots, BLOCK_TOKENS, row bytes) uint8 per part of the layer's form: one, or K and V."""
        plan, window = self._layout.plan, self.window_layer(layer)
        if window is not None:
            return [part[:, window] for part in self._window]
        if self._layout.form(layer) is Form.HIDDEN:
            return [self._hidden[:, layer - plan.recompute]]
        return [part[:, layer - plan.recompute - plan.hidden] for part in self._kv]

    def widths(self, layer: int) -> list[int]:
        """Row bytes of each part."""
        shape = self._layout.shape
        if self.window_layer(layer) is not None:
            return [part.shape[3] for part in self._window]
        hidden = self._layout.form(layer) is Form.HIDDEN
        return [shape.hidden_bytes] if hidden else list(shape.kv_parts)


def copy_piece(
    copy_stream: CopyStream, piece: Piece, source: torch.Tensor, target: torch.Tensor
) -> None:
    """Enqueue the rows of a piece from one layer of the host pool to consecutive rows of `target`.

    Each of a few runs is a two-dimensional copy. Many runs, of scattered slots, are one batch if
    the copy stream has batches, so this thread's time does not grow with their number.
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


class StagingRing:
    """Frames of one size on the device, which one restore pass after the other takes in turn.

    A frame is given back with a point in the compute work behind its last reader. The next copies
    into it start after that point and wait for no other compute work.
    """

    def __init__(
        self,
        frames: int,
        frame_bytes: int,
        device: torch.device,
        copy_stream: CopyStream,
        in_step: bool = False,
    ) -> None:
        """copy_stream: where the copies into the frames run. in_step: several ranks restore
        together with collectives between them, so the order of the work must not depend on how far
        the device is."""
        self.in_step = in_step
        self.device = device
        self.copy_stream = copy_stream
        self.bytes = frames * frame_bytes
        self.frame_bytes = frame_bytes
        self._free: deque[tuple[torch.Tensor, Event | None]] = deque(
            (torch.empty(frame_bytes, dtype=torch.uint8, device=device), None)
            for _ in range(frames)
        )
        self._finish_last: Callable[[], None] | None = None

    @classmethod
    def sized_for(
        cls,
        shape: StateShape,
        device: torch.device,
        copy_stream: CopyStream,
        in_step: bool = False,
        other_bytes: int = 0,
    ) -> StagingRing:
        """The default for a device. Each frame holds at least a block of either form, and of rows
        of `other_bytes`."""
        frames, size = CUDA_FRAMES if device.type == "cuda" else CPU_FRAMES
        least = BLOCK_TOKENS * max(shape.hidden_bytes, shape.kv_bytes, other_bytes)
        return cls(frames, max(size, least), device, copy_stream, in_step)

    def claim(self, finish: Callable[[], None]) -> None:
        """A pass begins to use the frames. If the pass before it is not over, that one is finished
        first: two passes that each hold some of the frames could block each other."""
        if self._finish_last is not None:
            self._finish_last()
        self._finish_last = finish

    def release(self, finish: Callable[[], None]) -> None:
        """The pass that gave `finish` is over. The ring drops its reference to the pass, or the
        frames would stay in memory until the garbage collector finds the cycle."""
        if self._finish_last == finish:
            self._finish_last = None

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
        """A frame, (frame_bytes,) uint8, for copies enqueued from now on. Raises IndexError when
        no frame is left."""
        frame, read = self._free.popleft()
        if read is not None:
            self.copy_stream.after(read)
        return frame

    def give_back(self, frame: torch.Tensor) -> None:
        """The pass has submitted all compute work that reads the frame."""
        self._free.append((frame, self.copy_stream.computed()))


def carve(frame: torch.Tensor, rows: int, widths: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive (rows, width) views of a frame."""
    views, at = [], 0
    for width in widths:
        views.append(frame[at : at + rows * width].view(rows, width))
        at += rows * width
    return views
