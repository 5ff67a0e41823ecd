"""The one `BlockIo` of the tests. It works, fails or loses everything when a test says so."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.host_pool import SlotPool
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting

GARBAGE = 0xEE


@dataclass(frozen=True)
class Move:
    """An operation under way."""

    ticket: int
    block_id: bytes
    slot: int
    deadline: float
    write: bool


class FakeIo:
    """Blocks below the host tier, in memory.

    Operations are performed by `step`, the oldest first; one that is still waiting at its deadline
    times out. After `lose` the disk is out of use, as one that hangs, until `back`.
    """

    name = "disk"
    tier = SourceTier.DISK
    has_record = rests = True
    is_shared = hangs = False

    def __init__(
        self,
        pool: SlotPool | None = None,
        *,
        capacity: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
        writes_wait: bool = False,
        polls_per_step: int = 0,
    ) -> None:
        """pool: where bytes are moved from and to; without one, only identities are kept.
        writes_wait: writes wait for `step` too, instead of being done at once. polls_per_step:
        every so many polls make a step, so that waiting for it ends; 0 for none."""
        self.capacity = capacity
        self.tiers = (self.tier,)
        self.counts: Counter[str] = Counter()
        self.moves: deque[Move] = deque()
        self.begun: list[bytes] = []
        """Identities of all reads that were asked for."""
        self.uses: dict[bytes, float | None] = {}
        """The latest hint for each block."""
        self.hints = 0
        self.far: set[bytes] = set()
        """Of the blocks here those that lie in a remote store."""
        self.up = True
        self._blocks: dict[bytes, np.ndarray | None] = {}
        self._pool = pool
        self._clock = clock
        self._writes_wait = writes_wait
        self._polls_per_step = polls_per_step
        self._polls = 0
        self._done: list[BlockDone] = []
        self._news: dict[bytes, bool] = {}
        """See `changes`."""
        self.written: dict[bytes, Block] = {}
        """All that were ever to be written."""

    # -- what a test tells it --------------------------------------------------------------------

    def hold(self, block_ids: Iterable[bytes]) -> None:
        """These blocks were written long ago."""
        new = dict.fromkeys(block_ids)
        self._blocks |= new
        self._news |= dict.fromkeys(new, True)

    def evict(self, block_id: bytes) -> None:
        """A block leaves by itself."""
        del self._blocks[block_id]
        self._news[block_id] = False

    def held(self) -> set[bytes]:
        return set(self._blocks)

    def step(self, outcome: Outcome = Outcome.OK, at: float | None = None) -> None:
        """End the oldest operation with this outcome, as far as that is possible. A read that does
        not end well leaves garbage in its slot. at: when it was done."""
        if self.moves:
            self._end(self.moves.popleft(), outcome, at)

    def end_all(self, outcome: Outcome = Outcome.OK, at: float | None = None) -> None:
        while self.moves:
            self.step(outcome, at)

    def lose(self) -> None:
        """Everything under way fails, half done. What was there is there when it is back."""
        there = self._blocks.copy()
        self.end_all(Outcome.IO_ERROR)
        self._blocks, self.up = there, False
        self._news |= dict.fromkeys(there, False)

    def back(self) -> None:
        self.up = True
        self._news |= dict.fromkeys(self._blocks, True)

    # -- BlockIo and LocalBlockIo ----------------------------------------------------------------

    def contains(self, block_ids: Sequence[bytes]) -> int:
        here = itertools.takewhile(lambda name: self.up and name in self._blocks, block_ids)
        return sum(1 for _ in here)

    def sources(self, block_ids: Sequence[bytes]) -> list[SourceTier]:
        return [SourceTier.REMOTE if name in self.far else self.tier for name in block_ids]

    def changes(self, *, anew: bool = False) -> Mapping[bytes, bool]:
        news, self._news = self._blocks if anew else self._news, {}
        return {name: self.contains((name,)) > 0 for name in news}

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        return False

    def wants(self, block_id: bytes, *, had: bool = False) -> bool:
        return block_id not in self._blocks

    def look_up(self, ticket: int, block_ids: Sequence[bytes], deadline: float) -> None:
        raise AssertionError("it is not shared")

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> None:
        if not self.up:
            self._done.append(BlockDone(ticket, Outcome.DROPPED, self.tier.value))
            return
        self.written[block.block_id] = block
        move = Move(ticket, block.block_id, slot, deadline, write=True)
        if self._writes_wait:
            self.moves.append(move)
        else:
            self._end(move, Outcome.OK)

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        self.begun.append(block_id)
        self.moves.append(Move(ticket, block_id, slot, deadline, write=False))

    def poll(self) -> list[BlockDone]:
        self._polls += 1
        if self._polls_per_step and self._polls % self._polls_per_step == 0:
            self.step()
        for move in [move for move in self.moves if move.deadline <= self._clock()]:
            self.moves.remove(move)
            self._end(move, Outcome.TIMED_OUT)
        done, self._done = self._done, []
        return done

    def touch(self, block_ids: Sequence[bytes]) -> None:
        return None

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        self.uses |= uses
        self.hints += 1

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> None:
        """At once. The fake has no labels, so it forgets the named blocks."""
        gone = self.held() & set(block_ids) if what is not None else self.held()
        for block_id in gone:
            del self._blocks[block_id]
        self._news = {} if what is None else self._news | dict.fromkeys(gone, False)
        self._done.append(BlockDone(ticket, Outcome.OK, self.tier.value, None, len(gone)))

    def levels(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        return None

    def _end(self, move: Move, outcome: Outcome, at: float | None = None) -> None:
        if not move.write and outcome is Outcome.OK and move.block_id not in self._blocks:
            outcome = Outcome.MISSING
        if move.write and outcome is Outcome.OK:
            self._blocks[move.block_id] = None if self._pool is None else self._slot(move).copy()
            self._news.pop(move.block_id, None)
        elif not move.write and self._pool is not None:
            kept = self._blocks.get(move.block_id)
            well = outcome is Outcome.OK and kept is not None
            self._slot(move)[:] = kept if well else GARBAGE
        if not move.write and outcome in (Outcome.DAMAGED, Outcome.IO_ERROR):
            self._blocks.pop(move.block_id, None)
            self._news[move.block_id] = False
        (tier,) = self.sources((move.block_id,))
        self._done.append(BlockDone(move.ticket, outcome, tier.value, at))

    def _slot(self, move: Move) -> np.ndarray:
        assert self._pool is not None
        return self._pool.slot(move.slot)
