"""Operations of one kind under way on all ranks, and what the ranks together say of each.

    begin     all ranks begin the same operations in the same order, so each has one number
    vote      this rank's part is over: one word on the board, which decides nothing
    voted_by_all   rank 0 sees that everybody has voted, and tells it in the next `Decisions`
    decide    the decision has come, in the same pass on every rank; only now anybody acts on it

So no decision depends on when a rank's own part was over.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sglang_hc.ranks.board import PLACES, CompletionBoard, Kind, Vote
from sglang_hc.store.executor import DRAIN_S
from sglang_hc.store.outcome import GOOD, Outcome

LONGEST_DRAIN_S = DRAIN_S
"""Longest that a rank waits for its own parts before it gives them up for all ranks."""


def a_moment() -> None:
    """Between two looks at what the other ranks have voted."""
    time.sleep(0.0005)


class Decision(NamedTuple):
    """How an operation ended for all ranks. value: see `Vote`; what `PendingOps.begin` made of all
    ranks'."""

    number: int
    outcome: Outcome
    value: int = 0


def decision_of(votes: Iterable[Outcome]) -> Outcome:
    """One no is a no for all; of several, that which says the most: a slot is not safe yet, the
    block is not there, it is damaged, it could not be read or written, and so on in the order of
    `Outcome`."""
    said = set(votes)
    for outcome in Outcome:
        if outcome in said and outcome not in GOOD:
            return outcome
    return Outcome.OK if Outcome.OK in said else Outcome.DUPLICATE


class Decided(NamedTuple):
    """What a decision says to whoever gave the operation its ticket."""

    ticket: int
    outcome: Outcome
    value: int


class PendingOps:
    """Belongs to the scheduler thread of one rank. Tickets name operations as in `Executor`.

    failures: parts that ended badly, by rank and outcome. Rank 0 counts all of them, the others
    those that they waited for in `drain`.
    """

    def __init__(
        self, board: CompletionBoard, kind: Kind, wait: Callable[[], None] = a_moment
    ) -> None:
        """wait: passes the time in `drain`."""
        self._board = board
        self._kind = kind
        self._wait = wait
        self._alone = False
        self._numbers = itertools.count()
        self._open: dict[int, int] = {}
        """Tickets by number."""
        self._of_all: dict[int, Callable[[Iterable[int]], int]] = {}
        """How all ranks' values become one, by number."""
        self._names: dict[int, int] = {}
        """Numbers by ticket."""
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        """Begun, and not started because the board has no place for them."""
        self._voted: dict[int, None] = {}
        """Open ones that this rank has voted on and not seen voted_by_all."""
        self._given_up: set[int] = set()
        """Tickets on which this rank has voted before its part was over."""
        self._voted_by_all: list[Decision] = []
        self._decided: list[Decided] = []
        self.failures: Counter[tuple[int, Outcome]] = Counter()

    def __len__(self) -> int:
        """Operations that are not decided on."""
        return len(self._open)

    def begin(
        self,
        ticket: int,
        start: Callable[[], None],
        of_all: Callable[[Iterable[int]], int] = max,
    ) -> None:
        """An operation begins: `start` is called as soon as it has a place on the board. of_all:
        makes one value of those of all ranks."""
        number = next(self._numbers)
        self._of_all[number] = of_all
        self._open[number] = ticket
        self._names[ticket] = number
        self._held.append((number, start))
        self._start()

    def vote(self, ticket: int, outcome: Outcome, value: int = 0) -> None:
        """This rank's part of an operation is over. value: see `Vote`."""
        if ticket in self._given_up:
            self._given_up.remove(ticket)
            return
        number = self._names[ticket]
        self._board.vote(self._kind, number, Vote(outcome, value))
        if self._alone:
            self.decide([Decision(number, outcome, value)])
        else:
            self._voted[number] = None

    def voted_by_all(self) -> Sequence[Decision]:
        """What everybody has voted on and was not decided. For rank 0, which tells it to all."""
        if self._voted:
            for number in list(self._voted):
                votes = self._board.votes(self._kind, number)
                if votes is not None:
                    del self._voted[number]
                    self._voted_by_all.append(self._decision(number, votes))
        return self._voted_by_all

    def decide(self, decisions: Iterable[Decision]) -> None:
        """These operations are over, on all ranks; for rank 0, all that it had
        found in `voted_by_all`."""
        for number, outcome, value in decisions:
            ticket = self._open.pop(number)
            del self._names[ticket], self._of_all[number]
            self._voted.pop(number, None)
            self._decided.append(Decided(ticket, outcome, value))
        self._voted_by_all = []
        self._start()

    def take_decided(self) -> list[Decided]:
        """What was decided since the last call."""
        decided, self._decided = self._decided, []
        return decided

    def drain(self, poll: Callable[[], None]) -> None:
        """Wait until everything that was begun is decided, without rank 0: all ranks do this at the
        same place, and each reads the same votes. What this rank has not done within
        LONGEST_DRAIN_S is STUCK for all. poll: takes in what this rank's parts have done."""
        end = time.monotonic() + LONGEST_DRAIN_S
        while self._open:
            if self._alone:
                self._wait_for(poll, end)
                continue
            held = {number for number, _ in self._held}
            numbers = [number for number in self._open if number not in held]
            while (votes := self._all_votes(numbers)) is None:
                self._wait_for(poll, end)
            seen = {decision.number: decision for decision in self._voted_by_all}
            self.decide(
                seen.get(number) or self._decision(number, some)
                for number, some in zip(numbers, votes, strict=True)
            )

    def leave(self) -> None:
        """From now on this rank's vote is the decision: the server stops, and nothing is decided in
        common any more."""
        self._alone = True
        own = self._board.rank
        votes = [(n, self._board.vote_of(self._kind, n, own)) for n in self._open]
        self.decide(Decision(number, *vote) for number, vote in votes if vote is not None)

    def _wait_for(self, poll: Callable[[], None], end: float) -> None:
        poll()
        if time.monotonic() >= end:
            own, held = self._board.rank, {number for number, _ in self._held}
            for number, ticket in list(self._open.items()):
                if number not in held and self._board.vote_of(self._kind, number, own) is None:
                    self.vote(ticket, Outcome.STUCK)
                    self._given_up.add(ticket)
        self._wait()

    def _all_votes(self, numbers: Sequence[int]) -> list[list[Vote]] | None:
        found = []
        for number in numbers:
            votes = self._board.votes(self._kind, number)
            if votes is None:
                return None
            found.append(votes)
        return found

    def _decision(self, number: int, votes: Sequence[Vote]) -> Decision:
        for rank, vote in enumerate(votes):
            if vote.outcome not in GOOD:
                self.failures[rank, vote.outcome] += 1
        value = self._of_all[number](vote.value for vote in votes)
        return Decision(number, decision_of(vote.outcome for vote in votes), value)

    def _start(self) -> None:
        while self._held and self._held[0][0] - next(iter(self._open)) < PLACES:
            self._held.popleft()[1]()
