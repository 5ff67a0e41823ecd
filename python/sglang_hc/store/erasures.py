"""Erasing below the host tier, one after the other: writes that would bring something back come
before it, and it ends when every tier has answered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from sglang_hc.store.block_io import BlockDone, BlockIo
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting

Ended = Callable[[Sequence[BlockDone]], object]
"""Told how erasing ended, by tier."""


ERASE_S = 600.0
"""Longest that somebody is kept waiting; what is not erased by then is said to be left."""


@dataclass(eq=False)
class _Erasure:
    """writes: tickets of those under way that would bring back what is erased. due: when whoever
    asked is told, whatever has ended by then."""

    what: Forgetting | None
    block_ids: Sequence[bytes]
    ended: Ended
    writes: set[int]
    due: float
    began: bool = False
    answers: list[BlockDone] = field(default_factory=list)


class Erasures:
    """Those of one lower tier, by ticket. Belongs to the scheduler thread."""

    def __init__(self, io: BlockIo) -> None:
        self._io = io
        self._asked: dict[int, _Erasure] = {}
        self._late: set[int] = set()
        """Those that nobody waits for any more."""

    def __len__(self) -> int:
        return len(self._asked)

    def ask(
        self,
        ticket: int,
        what: Forgetting | None,
        block_ids: Sequence[bytes],
        writes: set[int],
        now: float,
        ended: Ended,
    ) -> None:
        """See `LowerTier.erase`. writes: tickets that must have ended before."""
        self._asked[ticket] = erasure = _Erasure(what, block_ids, ended, writes, now + ERASE_S)
        self._begin_behind_writes(ticket, erasure)

    def take(self, done: BlockDone) -> bool:
        """Whether this is the answer of a tier that erased."""
        if done.ticket in self._asked:
            self._asked[done.ticket].answers.append(done)
            return True
        return done.ticket in self._late

    def go_on(self, writing: Collection[int], now: float) -> None:
        """Begin what can begin, and end what has ended. writing: tickets of writes under way."""
        for ticket, erasure in list(self._asked.items()):
            answered = [done.tier for done in erasure.answers]
            silent = [tier.value for tier in self._io.tiers if tier.value not in answered]
            if not silent or now >= erasure.due:
                del self._asked[ticket]
                self._late.update([ticket] if silent else ())
                left = [BlockDone(ticket, Outcome.TIMED_OUT, tier) for tier in silent]
                erasure.ended([*erasure.answers, *left])
            elif not erasure.began:
                erasure.writes.intersection_update(writing)
                self._begin_behind_writes(ticket, erasure)

    def _begin_behind_writes(self, ticket: int, erasure: _Erasure) -> None:
        if not erasure.writes:
            erasure.began = True
            self._io.erase(ticket, erasure.what, erasure.block_ids)
