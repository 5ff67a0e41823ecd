"""A remote store on several ranks: each keeps its part of a block there, under a key of its own.

All ranks are told the same of the store, in the same pass, so they know the same blocks to be
there: those of which every rank has found its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.ranks.ballot import Ballot
from sglang_hc.ranks.transfers import AgreedTransfers
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote import Found, StoreIo


class AgreedStore:
    """A `StoreIo` that answers what the verdicts say, whenever it is asked."""

    def __init__(
        self,
        inner: StoreIo,
        transfers: Ballot,
        lookups: Ballot,
        clock: Callable[[], float],
        *,
        clears: bool,
    ) -> None:
        """clock: the one of decisions, which deadlines are on. clears: this is the rank that
        empties the store, which is one for all ranks."""
        self._inner = inner
        self._transfers = AgreedTransfers(inner, SourceTier.REMOTE, transfers, clock)
        self._lookups = lookups
        self._clears = clears

    # -- what the ranks tell each other ----------------------------------------------------------

    def vote(self) -> None:
        """Say what this rank has done since the last call."""
        for ticket, outcome, count in self._inner.found():
            self._lookups.vote(ticket, outcome, count)
        self._transfers.vote()

    def settle(self) -> None:
        """See `AgreedTransfers.settle`; nobody waits for look-ups."""
        self._transfers.settle()

    # -- StoreIo ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def hangs(self) -> bool:
        return self._inner.hangs

    def look_up(self, ticket: int, block_ids: Sequence[bytes], deadline: float) -> None:
        due = self._transfers.locally(deadline)
        self._lookups.begin(ticket, lambda: self._inner.look_up(ticket, block_ids, due))

    def erase(self, ticket: int, block_ids: Sequence[bytes] | None, deadline: float) -> None:
        due = self._transfers.locally(deadline)
        if self._clears or block_ids is not None:  # single blocks have a part on each rank
            self._lookups.begin(ticket, lambda: self._inner.erase(ticket, block_ids, due))
        else:
            self._lookups.begin(ticket, lambda: self._lookups.vote(ticket, Outcome.OK))

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        self._transfers.read(ticket, block_id, slot, deadline)

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        self._transfers.write(ticket, block, slot, deadline)
        return True

    def found(self) -> list[Found]:
        self.vote()
        return [Found(*decided) for decided in self._lookups.take_decided()]

    def poll(self) -> list[BlockDone]:
        self.vote()
        return self._transfers.take_done()

    def close(self) -> None:
        self._inner.close()
