"""A holder of blocks that works when told to, badly when told to, and may lose everything."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.disk import Block
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from support.no_blocks import NoBlocks

GARBAGE = 0xEE


@dataclass(frozen=True)
class _Move:
    ticket: int
    block_id: bytes
    slot: int
    write: bool


class LossyIo(NoBlocks):
    """BlockIo in memory. `step` performs the oldest operation; a read that does not end well leaves
    garbage in its slot. `lose` is the death of the process behind it, `back` its return.

    Every eighth poll does a step too, so that waiting for it ends.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._polls = 0
        self._done: list[BlockDone] = []
        self.blocks: dict[bytes, np.ndarray] = {}
        self.moves: deque[_Move] = deque()
        self.up = True

    def step(self, outcome: Outcome = Outcome.OK) -> None:
        """Perform the oldest operation with this outcome, as far as that is possible."""
        if not self.moves:
            return
        move = self.moves.popleft()
        slot = self._pool.slot(move.slot)
        if move.write:
            if outcome is Outcome.OK:
                self.blocks[move.block_id] = slot.copy()
        elif outcome is Outcome.OK and move.block_id in self.blocks:
            slot[:] = self.blocks[move.block_id]
        else:
            slot[:] = GARBAGE
            if outcome is Outcome.OK:
                outcome = Outcome.MISSING
            if outcome in (Outcome.DAMAGED, Outcome.IO_ERROR):
                self.blocks.pop(move.block_id, None)
        self._done.append(BlockDone(move.ticket, outcome, "disk"))

    def lose(self) -> None:
        """Everything under way is lost, and half done."""
        while self.moves:
            self.step(Outcome.LOST)
        self.up = False

    def back(self) -> None:
        self.up = True

    def contains(self, block_ids: Sequence[bytes]) -> int:
        known = itertools.takewhile(lambda name: self.up and name in self.blocks, block_ids)
        return sum(1 for _ in known)

    def wants(self, block_id: bytes) -> bool:
        return block_id not in self.blocks

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        if self.up:
            self.moves.append(_Move(ticket, block.block_id, slot, write=True))
        return self.up

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        self.moves.append(_Move(ticket, block_id, slot, write=False))

    def poll(self) -> list[BlockDone]:
        self._polls += 1
        if self._polls % 8 == 0:
            self.step()
        done, self._done = self._done, []
        return done

    def clear(self) -> None:
        self.blocks.clear()
