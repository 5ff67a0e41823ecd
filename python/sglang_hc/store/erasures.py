"""Erasing below the host tier, one after the other: writes that would bring something back come
before it, and it ends when every tier has answered."""

from __future__ import annotations

from collections import Counter
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
    asked is told, whatever has ended by then. left: answers to come; None before it has begun."""

    what: Forgetting | None
    block_ids: Sequence[bytes]
    ended: Ended
    writes: set[int]
    due: float
    left: int | None = None
    answers: list[BlockDone] = field(default_factory=list)


class Erasures:
    """Those of one disk tier, by ticket. Belongs to the scheduler thread."""

    def __init__(self, io: BlockIo) -> None:
        self._io = io
        self._asked: dict[int, _Erasure] = {}
        self._late: Counter[int] = Counter()
        """Answers to come of those that nobody waits for any more, by ticket."""

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
        erasure = _Erasure(what, block_ids, ended, writes, now + ERASE_S)
        self._asked[ticket] = erasure
        if not writes:
            self._begin(ticket, erasure)

    def take(self, done: BlockDone) -> bool:
        """Whether this is the answer of a tier that erased."""
        if done.ticket in self._late:
            self._late -= Counter([done.ticket])
            return True
        erasure = self._asked.get(done.ticket)
        if erasure is None or erasure.left is None:
            return False
        erasure.answers.append(done)
        erasure.left -= 1
        return True

    def go_on(self, writing: Collection[int], now: float) -> None:
        """Begin what can begin, and end what has ended. writing: tickets of writes under way."""
        for ticket, erasure in list(self._asked.items()):
            if now >= erasure.due and erasure.left != 0:
                del self._asked[ticket]
                self._late += Counter({ticket: erasure.left or 0})
                erasure.ended([*erasure.answers, BlockDone(ticket, Outcome.TIMED_OUT, "disk")])
                continue
            if erasure.left is None:
                erasure.writes.intersection_update(writing)
                if not erasure.writes:
                    self._begin(ticket, erasure)
            elif not erasure.left:
                del self._asked[ticket]
                erasure.ended(erasure.answers)

    def _begin(self, ticket: int, erasure: _Erasure) -> None:
        erasure.left = self._io.erase(ticket, erasure.what, erasure.block_ids)
