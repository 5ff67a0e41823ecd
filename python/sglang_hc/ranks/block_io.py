"""Blocks below the host tier on several ranks: each has its part of a block on its own disk.

A block is there when all ranks have their part. Which blocks those are is known alike on every
rank: from the verdicts on writes and reads, and from what rank 0 tells of its own disk. A part that
a rank does not have after all makes the read fail for all of them; the block is then forgotten and
computed again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.ranks.ballot import Ballot
from sglang_hc.ranks.transfers import AgreedTransfers
from sglang_hc.store import block_io
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone, OwnDisk
from sglang_hc.store.circuit_breaker import CircuitBreaker
from sglang_hc.store.outcome import GOOD, Outcome
from sglang_hc.tree.forgetting import Forgetting

NEWS = 2048
"""Most identities that are told at once."""

_GONE = (Outcome.MISSING, Outcome.DAMAGED)
_UNWELL = (Outcome.STUCK, Outcome.IO_ERROR, Outcome.TIMED_OUT)


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
        self._transfers = AgreedTransfers(inner, SourceTier.DISK, ballot, clock)
        self._known: dict[bytes, None] = {}
        self._news: dict[bytes, bool] = {}
        self._breaker = CircuitBreaker(clock)
        self._writes: dict[int, bytes] = {}
        self._reads: dict[int, bytes] = {}
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
        self._transfers.vote()

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

    def hear(self, news: Mapping[bytes, bool]) -> None:
        """What rank 0 tells all ranks of its disk, after the verdicts of the pass."""
        self._take_decided()
        for block_id, here in news.items():
            if here:
                self._known[block_id] = None
            else:
                self._known.pop(block_id, None)

    def settle(self) -> None:
        """See `AgreedTransfers.settle`."""
        self._transfers.settle()

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
        self._writes[ticket] = block.block_id
        self._transfers.write(ticket, block, slot, deadline)
        return True

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        self._reads[ticket] = block_id
        self._transfers.read(ticket, block_id, slot, deadline)

    def poll(self) -> list[BlockDone]:
        self.vote()
        self._take_decided()
        done, self._done = self._done, []
        return done

    def touch(self, block_ids: Sequence[bytes]) -> None:
        self._inner.touch(block_ids)

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        self._inner.expect(uses)

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> int:
        """Answered with the most blocks that one rank had a part of."""
        if what is None:
            self._known.clear()
            self._news.clear()
        self._transfers.erase(self._inner, ticket, what, block_ids)
        return 1

    def levels(self) -> dict[str, int]:
        return self._inner.levels()

    def close(self) -> None:
        self._inner.close()

    # -- inner parts -----------------------------------------------------------------------------

    def _take_decided(self) -> None:
        for done in self._transfers.take_done():
            written = self._writes.pop(done.ticket, None)
            block_id = self._reads.pop(done.ticket, None) if written is None else written
            if block_id is None:  # something was erased
                self._done.append(done)
                continue
            if done.outcome in _UNWELL:
                self._breaker.failed()
            elif done.outcome is not Outcome.DROPPED:
                self._breaker.succeeded()
            if written is not None and done.outcome in GOOD:
                self._known[block_id] = None
            elif done.outcome in _GONE:
                self._known.pop(block_id, None)
            self._done.append(done)
