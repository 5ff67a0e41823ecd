"""Reads and writes of blocks on several ranks: each moves its part, and all end alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.ranks.ballot import Ballot
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone, OwnDisk
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote import StoreIo
from sglang_hc.tree.forgetting import Forgetting


class AgreedTransfers:
    """Begins each rank's part, and answers what the verdicts say.

    A write that this rank's part refuses is a no. A read is taken to have been done when the
    slowest rank's part was: so much later than it was asked for, on the clock of decisions, as that
    rank's part took.
    """

    def __init__(
        self, inner: OwnDisk | StoreIo, tier: SourceTier, ballot: Ballot, clock: Callable[[], float]
    ) -> None:
        """tier: what `inner` is. clock: the one of decisions, which deadlines are on."""
        self._inner = inner
        self._tier = tier.value
        self._ballot = ballot
        self._clock = clock
        self._asked: dict[int, float] = {}
        """When reads were asked for, on the clock of decisions, and when their parts began here."""
        self._erasures: set[int] = set()
        self._begun: dict[int, float] = {}

    def vote(self) -> None:
        """Say what this rank has done since the last call."""
        for done in self._inner.poll():
            began, took = self._begun.pop(done.ticket, None), done.blocks
            if began is not None and done.at is not None:
                took = max(1, round((done.at - began) * 1e6))
            self._ballot.vote(done.ticket, done.outcome, took)

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        due = self.locally(deadline)

        def start() -> None:
            self._begun[ticket] = time.monotonic()
            self._inner.read(ticket, block_id, slot, due)

        self._asked[ticket] = self._clock()
        self._ballot.begin(ticket, start)

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> None:
        due = self.locally(deadline)

        def start() -> None:
            if not self._inner.write(ticket, block, slot, due):
                self._ballot.vote(ticket, Outcome.DROPPED)

        self._ballot.begin(ticket, start)

    def erase(
        self, disk: OwnDisk, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]
    ) -> None:
        """disk: `inner`."""
        self._erasures.add(ticket)

        def start() -> None:
            disk.erase(ticket, what, block_ids)

        self._ballot.begin(ticket, start)

    def locally(self, deadline: float) -> float:
        """The clock of decisions stands still while nothing happens; this rank's store has its
        own."""
        return deadline - self._clock() + time.monotonic()

    def settle(self) -> None:
        """Wait until everything under way is decided; all ranks come here at the same place of
        their decisions."""
        self._ballot.settle(self.vote)

    def take_done(self) -> list[BlockDone]:
        """What was decided since the last call."""
        found = []
        for ticket, outcome, took in self._ballot.take_decided():
            if ticket in self._erasures:
                self._erasures.remove(ticket)
                found.append(BlockDone(ticket, outcome, self._tier, None, took))
                continue
            asked = self._asked.pop(ticket, None)
            at = asked + took * 1e-6 if asked is not None and took else None
            found.append(BlockDone(ticket, outcome, self._tier, at))
        return found
