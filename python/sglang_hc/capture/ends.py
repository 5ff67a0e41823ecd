"""Saving what layers with sliding windows need to go on behind a block (`tree/ends.py`).

Their rows leave the device pool while a request runs, but for those of its last tokens. So they are
saved when a prompt or a chunk of it was computed, and when a request ends, where the path is likely
to be continued (`policy/ends.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from sglang_hc.capture.direct import DirectRows
from sglang_hc.device.gather_scatter import DevicePool
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.ends import Place, Stay, ends_wanted
from sglang_hc.store.executor import RowSpan
from sglang_hc.store.scatter_queue import ScatterQueue
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.ends import EndPart, Ends


class EndRows(NamedTuple):
    """What is on the device of a request for the layers with sliding windows.

    slots: (n,) int64, of tokens [first, first + n) in the pool of these layers, up to the last
    whole block. prompt: tokens of its prompt.
    """

    first: int
    slots: torch.Tensor
    prompt: int


def places_of(rows: EndRows, kept: int, shared: int, final: bool) -> list[Place]:
    """Where the path of a request gets ends when its first `kept` tokens are kept: behind its reply
    if it is over (final), else behind its prompt, when all of that is computed, and where it leaves
    a path that is known. shared: see `ends_wanted`."""
    if final:
        return ends_wanted(rows.prompt, kept)[-1:]
    if rows.prompt - kept < BLOCK_TOKENS:  # there may be a page more
        return ends_wanted(min(rows.prompt, kept), kept, shared)
    return [place for place in ends_wanted(kept, kept, shared) if place.stay is Stay.SHARED]


class EndSaver:
    """The way of these rows from the device into end parts. Belongs to the scheduler thread."""

    def __init__(
        self,
        ends: Ends,
        rows: DirectRows,
        pool: DevicePool,
        scatters: ScatterQueue,
    ) -> None:
        """rows: the way into `EndPool.window`. pool: of the layers with sliding windows alone."""
        self._ends = ends
        self._rows = rows
        self._pool = pool
        self._scatters = scatters
        self._layers = range(len(ends.layout.window.layers))

    def save(
        self,
        path: Sequence[BlockNode],
        rows: EndRows,
        places: Sequence[Place],
        counters: Counter[str],
    ) -> None:
        """Have a path continue in `places`. path: whole blocks in the tree, from the first one on;
        rows: up to its end. What cannot be saved is counted."""
        for place in places:
            if place.blocks <= len(path):
                self._save(path[: place.blocks], rows, place.stay, counters)

    def _save(
        self, path: Sequence[BlockNode], rows: EndRows, stay: Stay, counters: Counter[str]
    ) -> None:
        blocks = self._ends.layout.blocks
        lacking = [n for n in range(max(0, len(path) - blocks), len(path)) if path[n].end is None]
        if lacking and rows.first > lacking[0] * BLOCK_TOKENS:
            counters["ends_without_rows"] += 1
            return
        parts = self._ends.begin(path, stay=stay)
        if parts is None:
            counters["ends_without_room"] += 1
            return
        ended = self._ends.failed  # after an error rows may be on the way to some of them
        try:
            for part in parts:
                self._gather(part, path.index(part.node) * BLOCK_TOKENS - rows.first, rows.slots)
            ended = self._ends.written
        finally:
            for part in parts:
                self._scatters.last().then(partial(ended, part))
        if parts:
            counters["kept_ends"] += 1

    def _gather(self, part: EndPart, low: int, slots: torch.Tensor) -> None:
        """Save the rows of a block, of which `slots` has those from `low` on."""
        own = slots[low : low + BLOCK_TOKENS]

        def fill(targets: list[torch.Tensor], at: int, first: int, count: int) -> None:
            self._pool.gather(self._layers, own[first : first + count], targets, at)

        span = RowSpan(0, part.slot, 0, BLOCK_TOKENS)
        self._rows.add(0, BLOCK_TOKENS, fill, [span])
