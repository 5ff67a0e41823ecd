"""A store on several ranks: each has its part of a block there, under a name of its own.

All ranks are told the same, in the same pass, so they know the same blocks to be there. Of
directories that is what writes, reads and look-ups ended with, and what rank 0 tells of its own;
of a remote store only what look-ups found. A part that a rank does not have after all makes the
read fail for all of them; the block is then forgotten and computed again.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.ranks.pending_ops import PendingOps
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone, LocalBlockIo
from sglang_hc.store.outcome import GOOD, Outcome
from sglang_hc.tree.forgetting import Forgetting

NEWS = 2048
"""Most identities that are told at once."""

_GONE = (Outcome.MISSING, Outcome.DAMAGED)


class AgreedBlocks:
    """A `LocalBlockIo` that answers what the decisions say, whenever it is asked.

    A read is taken to have been done when the slowest rank's part was: so much later than it was
    asked for, on the clock of decisions, as that rank's part took.
    """

    rests = False

    def __init__(
        self,
        inner: LocalBlockIo,
        transfers: PendingOps,
        questions: PendingOps,
        capacity: int,
        clock: Callable[[], float],
        *,
        is_first: bool,
    ) -> None:
        """transfers, questions: of reads and writes, which somebody may wait for, and of the rest.
        capacity: blocks that fit on every rank. clock: the one of decisions, which deadlines are
        on. is_first: this rank empties what all ranks have in one remote store."""
        self.counts: Counter[str] = inner.counts
        self.tier, self.name, self.has_record = inner.tier, inner.name, inner.has_record
        self.capacity = capacity
        self.touch, self.expect = inner.touch, inner.expect
        self.levels, self.close = inner.levels, inner.close
        self.is_shared = inner.tier is SourceTier.REMOTE
        """Of disks rank 0 tells what others stored, and nobody waits for it."""
        self._inner = inner
        self._transfers, self._questions = transfers, questions
        self._clock = clock
        self._is_first = is_first
        self._known: dict[bytes, None] = {}
        self._news: dict[bytes, bool] = {}
        self._changed: dict[bytes, None] | None = None
        """What `changes` will name; None before its first call."""
        self._reads: dict[int, tuple[bytes, float]] = {}
        """Identities, and when they were asked for on the clock of decisions."""
        self._begun: dict[int, float] = {}
        """When their parts began here."""
        self._writes: dict[int, bytes] = {}
        self._asked: dict[int, Sequence[bytes]] = {}
        """What is looked up or erased, by ticket; nothing where it is erased."""
        self._done: list[BlockDone] = []

    @property
    def hangs(self) -> bool:
        return self._inner.hangs

    # -- what the ranks tell each other ----------------------------------------------------------

    def vote(self) -> None:
        """Say what this rank has done since the last call."""
        for done in self._inner.poll():
            if done.ticket in self._asked:
                self._questions.vote(done.ticket, done.outcome, done.blocks)
                continue
            began, took = self._begun.pop(done.ticket, None), 0
            if began is not None and done.at is not None:
                took = max(1, round((done.at - began) * 1e6))
            self._transfers.vote(done.ticket, done.outcome, took)

    def collect_changes(self) -> bool:
        """For rank 0: look for news of its own. Returns whether there are any."""
        self._news.update(self._inner.changes())
        return bool(self._news)

    def take_news(self) -> dict[bytes, bool]:
        """The next of them, for all ranks."""
        told = dict(itertools.islice(self._news.items(), NEWS))
        for block_id in told:
            del self._news[block_id]
        return told

    def apply_presence(self, news: Mapping[bytes, bool]) -> None:
        """What rank 0 tells all ranks of its own, after the decisions of the pass."""
        self._take_decided()
        for block_id, here in news.items():
            if here:
                self._note([block_id])
            else:
                self._forget([block_id])

    def drain(self) -> None:
        """Wait until every read and write under way is decided; all ranks come here at the same
        place of their decisions."""
        self._transfers.drain(self.vote)

    # -- LocalBlockIo ----------------------------------------------------------------------------

    def contains(self, block_ids: Sequence[bytes]) -> int:
        return sum(1 for _ in itertools.takewhile(self._known.__contains__, block_ids))

    def changes(self, *, anew: bool = False) -> Mapping[bytes, bool]:
        if anew or self._changed is None:
            self._changed = dict.fromkeys(self._known)
        changed, self._changed = self._changed, {}
        return {block_id: block_id in self._known for block_id in changed}

    def look_up(self, ticket: int, block_ids: Sequence[bytes], deadline: float) -> None:
        due, self._asked[ticket] = self._locally(deadline), block_ids
        start = lambda: self._inner.look_up(ticket, block_ids, due)  # noqa: E731
        self._questions.begin(ticket, start, min)

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        due = self._locally(deadline)

        def start() -> None:
            self._begun[ticket] = time.monotonic()
            self._inner.read(ticket, block_id, slot, due)

        self._reads[ticket] = block_id, self._clock()
        self._transfers.begin(ticket, start)

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> None:
        due, self._writes[ticket] = self._locally(deadline), block.block_id
        self._transfers.begin(ticket, lambda: self._inner.write(ticket, block, slot, due))

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> None:
        """Answered with the most blocks that one rank had a part of."""

        def start() -> None:
            if what is None and not self.has_record and not self._is_first:
                self._questions.vote(ticket, Outcome.OK)  # it is emptied of everybody's blocks
            else:
                self._inner.erase(ticket, what, block_ids)

        if what is None:
            self._forget(list(self._known))
            self._news.clear()
        self._asked[ticket] = ()
        self._questions.begin(ticket, start)

    def poll(self) -> list[BlockDone]:
        self.vote()
        self._take_decided()
        done, self._done = self._done, []
        return done

    # -- inner parts -----------------------------------------------------------------------------

    def _locally(self, deadline: float) -> float:
        """The clock of decisions stands still while nothing happens; this rank's store has its
        own."""
        return deadline - self._clock() + time.monotonic()

    def _take_decided(self) -> None:
        for ticket, outcome, count in self._questions.take_decided():
            self._judge(self._asked.pop(ticket)[:count], outcome)
            self._done.append(BlockDone(ticket, outcome, self.tier.value, None, count))
        for ticket, outcome, took in self._transfers.take_decided():
            at = None
            if ticket in self._writes:
                self._judge([self._writes.pop(ticket)], outcome)
            else:
                block_id, asked = self._reads.pop(ticket)
                at = asked + took * 1e-6 if took else None
                if outcome in _GONE:
                    self._forget([block_id])
            self._done.append(BlockDone(ticket, outcome, self.tier.value, at))

    def _judge(self, block_ids: Iterable[bytes], outcome: Outcome) -> None:
        """After such an outcome these may be there, for all ranks."""
        if outcome in GOOD and self.has_record:
            self._note(block_ids)

    def _note(self, block_ids: Iterable[bytes]) -> None:
        for block_id in block_ids:
            self._known[block_id] = None
            if self._changed is not None:
                self._changed[block_id] = None

    def _forget(self, block_ids: Iterable[bytes]) -> None:
        for block_id in block_ids:
            self._known.pop(block_id, None)
            if self._changed is not None:
                self._changed[block_id] = None
