"""Blocks below the host tier on several ranks: each has its part of a block on its own disk.

A block is there when all ranks have their part. Which blocks those are is known alike on every
rank: from the verdicts on writes and reads, and from what rank 0 tells of its own disk. A part that
a rank does not have after all makes the read fail for all of them; the block is then forgotten and
computed again.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.ranks.ballot import GOOD, Ballot, Verdict
from sglang_hc.store import block_io
from sglang_hc.store.block_io import BlockDone, OwnDisk
from sglang_hc.store.circuit_breaker import CircuitBreaker
from sglang_hc.store.disk import Block
from sglang_hc.store.outcome import Outcome

NEWS = 2048
"""Most identities that are told at once."""

_GONE = (Outcome.MISSING, Outcome.DAMAGED)
_UNWELL = (Outcome.LOST, Outcome.IO_ERROR, Outcome.TIMED_OUT)


class AgreedBlocks:
    """A `BlockIo` that answers what the verdicts say, whenever it is asked.

    Presence is what all ranks know alike, so the same questions have the same answers. Once several
    operations in a row have failed, on whichever rank, the disk is left alone by all for a while.
    """

    def __init__(
        self, inner: OwnDisk, ballot: Ballot, capacity: int, clock: Callable[[], float]
    ) -> None:
        """capacity: blocks that fit on every rank. clock: the one that the deadlines are on."""
        self.capacity = capacity
        self._inner = inner
        self._ballot = ballot
        self._clock = clock
        self._known: dict[bytes, None] = {}
        self._news: dict[bytes, bool] = {}
        self._breaker = CircuitBreaker(clock)
        self._writes: dict[int, bytes] = {}
        self._reads: dict[int, bytes] = {}
        self._tiers: dict[int, str] = {}
        """Which tier of this rank had its part, for what is under way."""
        self._done: list[BlockDone] = []

    @property
    def counts(self) -> Counter[str]:
        return self._inner.counts

    @property
    def name(self) -> str:
        return self._inner.name

    # -- what the ranks tell each other ----------------------------------------------------------

    def vote(self) -> None:
        """Say what this rank has done since the last call."""
        for done in self._inner.poll():
            self._tiers[done.ticket] = done.tier
            self._ballot.vote(done.ticket, done.outcome)

    def watch(self) -> bool:
        """For rank 0: look for news of its disk. Returns whether there are any."""
        self._news.update(self._inner.changes())
        return bool(self._news)

    def take_news(self) -> dict[bytes, bool]:
        """The next of them, for all ranks."""
        told = dict(itertools.islice(self._news.items(), NEWS))
        for block_id in told:
            del self._news[block_id]
        return told

    def decide(self, verdicts: Iterable[Verdict], news: Mapping[bytes, bool]) -> None:
        """What all ranks are told in one pass."""
        self._ballot.decide(verdicts)
        self._take_decided()
        for block_id, here in news.items():
            if here:
                self._known[block_id] = None
            else:
                self._known.pop(block_id, None)

    def settle(self) -> None:
        """Wait until everything under way is decided; all ranks come here at the same place of
        their decisions."""
        self._inner.flush()
        self._ballot.settle(self.vote)

    # -- BlockIo ---------------------------------------------------------------------------------

    def contains(self, block_ids: Sequence[bytes]) -> int:
        if not self._breaker.allows():
            return 0
        return sum(1 for _ in itertools.takewhile(self._known.__contains__, block_ids))

    def sources(self, block_ids: Sequence[bytes]) -> list[SourceTier]:
        return self._inner.sources(block_ids)

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        return False

    def wants(self, block_id: bytes) -> bool:
        return block_id not in self._known

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        if not self._breaker.allows() or len(self._writes) >= block_io.WRITE_QUEUE:
            return False

        def start() -> None:
            if not self._inner.write(ticket, block, slot, self._locally(deadline)):
                self._ballot.vote(ticket, Outcome.DROPPED)

        self._writes[ticket] = block.block_id
        self._ballot.begin(ticket, start)
        return True

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        self._reads[ticket] = block_id
        due = self._locally(deadline)
        self._ballot.begin(ticket, lambda: self._inner.read(ticket, block_id, slot, due))

    def flush(self) -> None:
        self._inner.flush()

    def poll(self) -> list[BlockDone]:
        self.vote()
        self._take_decided()
        done, self._done = self._done, []
        return done

    def touch(self, block_ids: Sequence[bytes]) -> None:
        self._inner.touch(block_ids)

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        self._inner.expect(uses)

    def clear(self) -> None:
        self._known.clear()
        self._inner.clear()
        self._news.clear()

    def levels(self) -> dict[str, int]:
        return self._inner.levels()

    def close(self) -> None:
        self._inner.close()

    # -- inner parts -----------------------------------------------------------------------------

    def _locally(self, deadline: float) -> float:
        """The clock of decisions stands still while nothing happens; this rank's store has its
        own."""
        return deadline - self._clock() + time.monotonic()

    def _take_decided(self) -> None:
        for ticket, outcome in self._ballot.take_decided():
            written = self._writes.pop(ticket, None)
            block_id = self._reads.pop(ticket) if written is None else written
            if outcome in _UNWELL:
                self._breaker.failed()
            elif outcome is not Outcome.DROPPED:
                self._breaker.succeeded()
            if written is not None and outcome in GOOD:
                self._known[block_id] = None
            elif outcome in _GONE:
                self._known.pop(block_id, None)
            tier = self._tiers.pop(ticket, self._inner.name)
            self._done.append(BlockDone(ticket, outcome, tier))
