"""Who asks what, and when: the one model of a load, for the simulator and for the benchmarks.

What is said is spans of token ids, so that a load of a hundred million tokens stays small: equal
spans are equal text. Where the ids themselves count, a turn has these.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sglang_hc.tree.identity import TOKEN_BYTES

TOKEN_IDS = 1 << 31
"""Token ids are drawn from [0, TOKEN_IDS), what the tree can pack."""


class Span(NamedTuple):
    """`length` consecutive token ids from `start`, modulo TOKEN_IDS. Same start, same text."""

    start: int
    length: int

    @property
    def packed(self) -> bytes:
        """The token ids as the tree wants them."""
        start = self.start % TOKEN_IDS
        ids = np.arange(start, start + self.length, dtype=np.int64)
        return (ids % TOKEN_IDS).astype(">i4").tobytes()


class Ids(NamedTuple):
    """Token ids, packed as the tree wants them."""

    packed: bytes

    @property
    def length(self) -> int:
        return len(self.packed) // TOKEN_BYTES


Said = Span | Ids


@dataclass(frozen=True)
class Turn:
    """One request of a session.

    said: new tokens, appended to the conversation; with `Session.whole` the entire prompt. answer:
    what the model answers. at: earliest arrival in seconds on the load's clock; None for "when the
    turn before has been answered". think: seconds between that answer and this turn. label: what a
    report counts it under. measured: False for a request that only fills caches. calls: the tool
    that the answer calls, whose result the next turn brings; empty for none.
    """

    said: tuple[Said, ...]
    answer: Said
    think: float = 0.0
    at: float | None = None
    label: str = ""
    measured: bool = True
    calls: str = ""

    @property
    def new_tokens(self) -> int:
        return sum(part.length for part in self.said)


@dataclass(frozen=True)
class Session:
    """Turns in order. arrival: of the first one, in seconds.

    end_id: the token that ends an answer of this model, where answers end as the model ends them,
    at their length at the latest. None where they have exactly their length.
    """

    arrival: float
    turns: tuple[Turn, ...]
    whole: bool = False
    end_id: int | None = None

    def moved(self, seconds: float) -> Session:
        """The same session so much earlier."""
        turns = tuple(
            turn if turn.at is None else replace(turn, at=turn.at - seconds) for turn in self.turns
        )
        return replace(self, arrival=self.arrival - seconds, turns=turns)


@dataclass(frozen=True)
class Workload:
    """name: where it comes from. warmup_turns: requests served before counting starts. notes: what
    a reader of results must know."""

    name: str
    sessions: tuple[Session, ...]
    warmup_turns: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


class FreshIds:
    """Hands out token ids from `first` on, so that different contents share no block."""

    def __init__(self, first: int = 0) -> None:
        self._first, self._given = first, 0

    def span(self, length: int) -> Span:
        span = Span(self._first + self._given, length)
        self._given = (self._given + length) % (TOKEN_IDS - self._first)
        return span


def poisson_arrivals(rng: random.Random, rate: float) -> Iterator[float]:
    """Arrival times in seconds at `rate` per second, from 0."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now
