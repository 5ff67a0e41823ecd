"""Which way rows leave the device: gathered in a snapshot, or straight into their slots.

KV stays in the device pool until it is saved, so all its rows go straight. Hidden states must leave
the taps after each pass. Decode steps have few rows of each request, so many steps share one
snapshot and one copy. A prefill has many rows of one request, which go straight into their slots;
so do its last few if snapshots have no room for them. So a prefill of any size is saved; only a
decode step's row can find no room, while scattering is behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_hc.capture.direct import DirectRows
from sglang_hc.capture.snapshots import Fill, Snapshots
from sglang_hc.capture.taps import TapBuffer
from sglang_hc.capture.verified import VerifiedRows
from sglang_hc.device.gather_scatter import DevicePool
from sglang_hc.forms import BlockLayout
from sglang_hc.store.executor import RowSpan

STRAIGHT_ROWS = 16
"""Fewest rows of one request in one pass that are worth a copy of their own."""


@dataclass(frozen=True)
class DeviceState:
    """Where a model's state is on the device, and how it leaves the device.

    pool: its KV. taps: its hidden states. hidden, kv: the ways for rows of each form; KV always
    goes straight. taps and hidden are None without hidden layers, kv is None without KV layers.
    verified: hidden states of verify passes; None without such passes.
    """

    pool: DevicePool
    taps: TapBuffer | None
    verified: VerifiedRows | None
    hidden: HiddenPath | None
    kv: DirectRows | None


class HiddenPath(NamedTuple):
    """The two ways for rows of hidden states from the device to slots. direct: into
    `HostPool.hidden`."""

    snapshots: Snapshots
    direct: DirectRows


class PassRows:
    """Rows of one pass, taken in their order. Call `end` after the last one."""

    def __init__(self, path: HiddenPath, fill: Fill) -> None:
        """fill: copies rows by their number in the pass."""
        self._direct = path.direct
        self._snapshots = path.snapshots
        self._fill = fill
        self._low = self._stop = 0
        self._spans: list[RowSpan] = []

    def room(self, rows: int, rewritten: bool) -> int:
        """How many of the next `rows` rows, of one request, can be taken, counted from the first.

        rewritten: their places were written before. A scatter must write them after the old rows.
        """
        return rows if self._straight(rows, rewritten) else min(rows, self._gathered_room)

    def add(self, row: int, rows: int, spans: Sequence[RowSpan], rewritten: bool) -> None:
        """Take the rows that `spans` name, of rows [row, row + rows). The caller asked `room` for
        them."""
        if not spans:
            return
        stop = spans[-1].source_row + spans[-1].rows
        straight = self._straight(rows, rewritten)
        if straight or row != self._stop:
            self.end()
        if straight:
            self._direct.add(row, stop, self._fill, spans)
            return
        if not self._spans:
            self._low = row
        self._spans += spans
        self._stop = stop

    def end(self) -> None:
        """Hand over what is gathered."""
        if self._spans:
            self._snapshots.add(self._low, self._stop, self._fill, self._spans)
            self._spans = []
        self._low = self._stop

    def _straight(self, rows: int, rewritten: bool) -> bool:
        if rewritten or rows == 1:  # a decode step has one row of each of many requests
            return False
        return rows >= STRAIGHT_ROWS or self._gathered_room < rows

    @property
    def _gathered_room(self) -> int:
        """Rows that fit into snapshots behind what is gathered already."""
        return self._snapshots.room - (self._stop - self._low)


def kv_rows(
    pool: DevicePool, layout: BlockLayout, slots: torch.Tensor, low: int, rows: int
) -> Fill:
    """Copies the KV rows that belong to tokens [low, low + rows) of a sequence, of all KV layers.

    slots: (n,) int64 device slots of the sequence. What a lagging draft layer has for the first
    token has no meaning: there is no position before it.
    """
    own = slots[low : low + rows]
    parts = [(layout.plan.kv_layers, own)] if layout.plan.kv else []
    if layout.draft.count:
        before = torch.arange(low, low + rows, device=slots.device) - layout.draft.lag
        parts.append((layout.draft_layers, slots[before.clamp(min=0)]))

    def fill(targets: list[torch.Tensor], at: int, first: int, count: int) -> None:
        done = 0
        for layers, wanted in parts:
            here = [target[done : done + len(layers)] for target in targets]
            pool.gather(layers, wanted[first : first + count], here, at)
            done += len(layers)

    return fill
