"""A restoration, and what it passes through on its way from the host tier into the KV pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_hc.device.copy_stream import CopyStream, SideStream
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.restore.staging import HostSpan, StagingRing
from sglang_hc.store.host_pool import EndPool, HostPool
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.ends import EndPart
from sglang_hc.tree.identity import unpack_tokens


class RestoreSink(Protocol):
    """The device's KV pool as the target of a restoration."""

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Project (n, hidden_bytes) uint8 rows to K/V at int64 positions and store them at slots.

        Bias, K norm and position embedding included. Must not change its inputs.
        """

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        """Store (n, part bytes) uint8 rows, one tensor per part of a KV row, at int64 slots."""


class Rotation(Protocol):
    """Takes stored K to other positions than it was computed at."""

    def move(
        self, layer: int, parts: Sequence[torch.Tensor], old: torch.Tensor, new: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """KV rows of a layer, (n, part bytes) uint8 per part, from positions `old` to `new`, both
        (n,) int64. Rows whose positions are equal keep their bytes. Does not change its inputs."""


@dataclass(frozen=True, eq=False)
class WindowRows:
    """Rows of the layers with sliding windows: those of the tokens in `ranges`, [begin, end) each
    and in their order, to be written to `device_slots`, int64, in the pool of these layers.

    parts: of consecutive blocks, the first of which has the number `first`.
    """

    parts: Sequence[EndPart]
    first: int
    ranges: Sequence[tuple[int, int]]
    device_slots: torch.Tensor

    def spans(self) -> list[HostSpan]:
        """Where these rows lie in the pool of end parts."""
        found = []
        for begin, end in self.ranges:
            for block in range(begin // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
                low, high = max(begin, block * BLOCK_TOKENS), min(end, (block + 1) * BLOCK_TOKENS)
                slot = self.parts[block - self.first].slot
                found.append(HostSpan(slot, low % BLOCK_TOKENS, high - low))
        return found


@dataclass(eq=False)
class Restoration:
    """Tokens [start, stop) of one path, to be written to `device_slots` ((stop - start,) int64).

    recompute: the layers below this one are recomputed and not loaded. It is at least the layer
    plan's recompute count; if it is larger, some stored layers are recomputed too.
    prefix_slots: (start,) int64 device slots of the tokens before, to which recomputed layers
    attend. Not needed if nothing is recomputed. first: place of nodes[0] in the path. window: what
    layers with sliding windows need to go on behind the path; None in a model without.
    """

    nodes: tuple[BlockNode, ...]
    start: int
    stop: int
    device_slots: torch.Tensor
    recompute: int = 0
    prefix_slots: torch.Tensor | None = None
    first: int = 0
    window: WindowRows | None = None

    def spans(self, start: int, stop: int) -> list[HostSpan]:
        """Where tokens [start, stop) lie in the host pool."""
        spans = []
        position = start
        while position < stop:
            block, row = divmod(position, BLOCK_TOKENS)
            rows = min(BLOCK_TOKENS - row, stop - position)
            spans.append(HostSpan(self.nodes[block - self.first].slot, row, rows))
            position += rows
        return spans

    def shifts(self) -> npt.NDArray[np.int64]:
        """(stop - start,) tokens by which each row's state was computed further from the start."""
        first = self.start // BLOCK_TOKENS
        nodes = self.nodes[first - self.first :]
        shifts = [0 if node.moved is None else node.moved.shift for node in nodes]
        skip = first * BLOCK_TOKENS
        rows = np.repeat(np.array(shifts, dtype=np.int64), BLOCK_TOKENS)
        return rows[self.start - skip : self.stop - skip]

    def tokens(self) -> npt.NDArray[np.int64]:
        """(stop - start,) token ids."""
        first = self.start // BLOCK_TOKENS
        packed = b"".join(node.tokens for node in self.nodes[first - self.first :])
        skip = first * BLOCK_TOKENS
        return unpack_tokens(packed)[self.start - skip : self.stop - skip]


class Recomputer(Protocol):
    """The model's own first layers."""

    def run(self, restoration: Restoration, between: Callable[[], None]) -> None:
        """Write K/V of layers [0, restoration.recompute) of its tokens to its device slots.

        Submits compute work in one or several passes over the model's layers, and calls `between`
        after each pass but the last. It asks the layer gate for every layer whose prefix it reads.
        Raises what a forward pass may raise; nothing may be served then.
        """


@dataclass(frozen=True)
class EndPath:
    """What end parts pass through beside blocks. sink: the pool of the layers with sliding windows,
    which are numbered there among themselves.

    numbers: of the model's layers, in the order of the model: what each has in a restore pass,
    those with full attention from 0 on, those with windows behind them and behind a draft model's.
    """

    pool: EndPool
    sink: RestoreSink
    numbers: Mapping[int, int]


@dataclass(frozen=True)
class RestorePath:
    """What restorations pass through on their way from the host tier into the KV pool.

    recomputer: None where no layer is recomputed. side_stream: the work is submitted to a stream
    beside the compute stream, `SIDE_LAYERS` layers ahead of the layer that is waited for; with None
    it is submitted to the compute stream when it is waited for. rotation: moves K of blocks that
    have moved; None where none does. in_turn: hidden states are projected in their own layer's turn
    alone, because its weights come to the device for that. ends: None where all layers have full
    attention.
    """

    pool: HostPool
    sink: RestoreSink
    staging: StagingRing
    recomputer: Recomputer | None = None
    side_stream: SideStream | None = None
    rotation: Rotation | None = None
    in_turn: bool = False
    ends: EndPath | None = None

    @property
    def copy_stream(self) -> CopyStream:
        """Where the copies run."""
        return self.staging.copy_stream
