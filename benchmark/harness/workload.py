"""What is asked: distributions, sessions and traces, generated from a seed.

A trace is fixed before any server sees it, so every arm answers the same requests at the same
times. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_hc.tools.cli.main import UsageError

_ARITY = {
    # name: (fewest parameters, most parameters, their names)
    "constant": (1, 1, "VALUE"),
    "uniform": (2, 2, "LOW:HIGH"),
    "exponential": (1, 2, "MEAN[:MAX]"),
    "poisson": (1, 2, "MEAN[:MAX]"),
    "lognormal": (2, 3, "MEAN:SIGMA[:MAX]"),
    "zipf": (2, 2, "ALPHA:MAX"),
}


@dataclass(frozen=True)
class Distribution:
    """A distribution of non-negative numbers written as `NAME:PARAMETERS`, or one plain number.

    `lognormal:MEAN:SIGMA` has arithmetic mean MEAN, and SIGMA is the standard deviation of the
    logarithm. `zipf:ALPHA:MAX` draws 1..MAX with probability proportional to rank**-ALPHA.
    """

    kind: str
    params: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, option: str) -> Distribution:
        """Raises UsageError that names `option` and the forms allowed."""
        kind, _, rest = text.partition(":")
        if not rest and kind not in _ARITY:
            kind, rest = "constant", kind
        known = ", ".join(f"{name}:{words}" for name, (_, _, words) in _ARITY.items())
        if kind not in _ARITY:
            raise UsageError(f"{option} {text!r}: unknown distribution; give a number or {known}")
        low, high, words = _ARITY[kind]
        try:
            params = tuple(float(part) for part in rest.split(":"))
        except ValueError:
            raise UsageError(
                f"{option} {text!r}: not numbers; give a number or {kind}:{words}"
            ) from None
        if not low <= len(params) <= high:
            raise UsageError(f"{option} {text!r}: give {kind}:{words}")
        if min(params) < 0 or not all(np.isfinite(params)):
            raise UsageError(f"{option} {text!r}: parameters must be finite and not negative")
        if kind == "uniform" and params[0] > params[1]:
            raise UsageError(f"{option} {text!r}: LOW must not exceed HIGH")
        if kind == "lognormal" and params[0] == 0:
            raise UsageError(f"{option} {text!r}: MEAN must be positive")
        if kind == "zipf" and params[1] < 1:
            raise UsageError(f"{option} {text!r}: MAX must be at least 1")
        return cls(kind, params)

    def draw(self, rng: np.random.Generator) -> float:
        """One value, never negative."""
        first = self.params[0]
        if self.kind == "constant":
            return first
        if self.kind == "uniform":
            return float(rng.uniform(first, self.params[1]))
        if self.kind == "zipf":
            ranks = int(self.params[1])
            return float(rng.choice(ranks, p=zipf_weights(ranks, first)) + 1)
        if self.kind == "lognormal":
            sigma = self.params[1]
            value = float(rng.lognormal(np.log(first) - sigma**2 / 2, sigma))
            limit = self.params[2:]
        else:
            value = float(
                rng.exponential(first) if self.kind == "exponential" else rng.poisson(first)
            )
            limit = self.params[1:]
        return min(value, *limit) if limit else value

    def draw_count(self, rng: np.random.Generator, least: int = 1) -> int:
        """One whole number, at least `least`."""
        return max(least, round(self.draw(rng)))

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{value:g}" for value in self.params)])


def zipf_weights(count: int, alpha: float) -> list[float]:
    """Probabilities of ranks 1..count under a Zipf law; uniform when `alpha` is 0."""
    weights = [rank**-alpha for rank in range(1, count + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


@dataclass(frozen=True)
class Vocabulary:
    """The token ids that prompts are drawn from: 0..size-1 without `special`."""

    size: int
    special: frozenset[int] = frozenset()

    def sample(self, rng: np.random.Generator, count: int) -> tuple[int, ...]:
        """`count` random ids."""
        ids = rng.integers(0, self.size, count)
        if self.special:
            bad = np.isin(ids, list(self.special))
            while bad.any():
                ids[bad] = rng.integers(0, self.size, int(bad.sum()))
                bad = np.isin(ids, list(self.special))
        return tuple(ids.tolist())


@dataclass(frozen=True)
class Turn:
    """One request of a session.

    ids: the user's new tokens, or the whole prompt when `whole` is set (a replayed trace says
    what the prompt was, so the history is not built from our own replies). text: the same as
    text, for OpenAI endpoints. think_s: pause between the last reply and this turn. at_s: not
    before this time of the trace's own clock. measured: False for requests that only fill caches.
    """

    ids: tuple[int, ...]
    output_len: int
    text: str = ""
    think_s: float = 0.0
    at_s: float | None = None
    whole: bool = False
    measured: bool = True
    label: str = ""


@dataclass(frozen=True)
class Session:
    """Turns of one user, in order. arrival_s: start of the first turn on the trace's clock.

    end_id: the token that ends a reply of this model. When it is set, replies end where the model
    ends them, at their length at the latest, and the history has it after every reply. When it is
    None, replies have exactly their length.
    """

    name: str
    turns: tuple[Turn, ...]
    arrival_s: float = 0.0
    system_ids: tuple[int, ...] = ()
    system_text: str = ""
    end_id: int | None = None

    def closed(self, reply: Sequence[int]) -> list[int]:
        """The ids of a reply as they stand in the history."""
        missing = self.end_id is not None and (not reply or reply[-1] != self.end_id)
        return [*reply, self.end_id] if missing and self.end_id is not None else list(reply)


@dataclass(frozen=True)
class Trace:
    """Sessions and where they came from. notes: what a reader of the results must know."""

    source: str
    sessions: tuple[Session, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def timed(self) -> bool:
        """Whether the trace brings its own times of arrival."""
        return any(turn.at_s is not None for s in self.sessions for turn in s.turns)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, replies counted at their full length."""
        return max(
            size - turn.output_len
            for session in self.sessions
            for size, turn in zip(_sizes(session), session.turns, strict=True)
        )

    def prompt_ids(self, session: int, turn: int, outputs: Sequence[Sequence[int]]) -> list[int]:
        """Exact prompt of one request, given the output ids of the session's earlier turns."""
        chosen = self.sessions[session]
        current = chosen.turns[turn]
        if current.whole:
            return list(current.ids)
        ids = list(chosen.system_ids)
        for before, output in zip(chosen.turns[:turn], outputs, strict=False):
            ids = list(before.ids) if before.whole else ids + list(before.ids)
            ids += chosen.closed(output)
        return ids + list(current.ids)


def warm_up(count: int, prompt_len: int, vocabulary: Vocabulary) -> Trace:
    """`count` requests of `prompt_len` tokens whose content is in no other trace."""
    rng = np.random.default_rng(2**31 - 1)
    turns = [Turn(vocabulary.sample(rng, prompt_len), 4) for _ in range(count)]
    return Trace("warm-up", tuple(Session(f"w{i}", (turn,)) for i, turn in enumerate(turns)))


def arrivals(kind: str, count: int, rate: float, rng: np.random.Generator) -> list[float]:
    """Start times of `count` sessions: `poisson` or `uniform` gaps of mean 1/rate, first at 0.

    An infinite rate starts all at 0.
    """
    if rate == float("inf") or count == 0:
        return [0.0] * count
    gaps = rng.exponential(1.0, count - 1) if kind == "poisson" else np.ones(count - 1)
    return [0.0, *(np.cumsum(gaps) / rate).tolist()]


@dataclass(frozen=True)
class ChatSpec:
    """A synthetic multi-turn chat. Distributions are per session (turns) or per turn (the rest)."""

    sessions: int
    turns: Distribution
    input_len: Distribution
    output_len: Distribution
    think: Distribution
    system_len: int = 0
    system_shared: bool = False


def synthetic_chat(spec: ChatSpec, vocabulary: Vocabulary, seed: Sequence[int]) -> Trace:
    """Random chat of `spec`; equal seeds give equal traces."""
    rng = np.random.default_rng(list(seed))
    shared = vocabulary.sample(rng, spec.system_len)
    sessions = []
    for number in range(spec.sessions):
        system = shared if spec.system_shared else vocabulary.sample(rng, spec.system_len)
        turns = tuple(
            Turn(
                ids=vocabulary.sample(rng, spec.input_len.draw_count(rng)),
                output_len=spec.output_len.draw_count(rng),
                think_s=spec.think.draw(rng) if index else 0.0,
            )
            for index in range(spec.turns.draw_count(rng))
        )
        sessions.append(Session(f"s{number}", turns, system_ids=system))
    words = "shared" if spec.system_shared else "own"
    source = (
        f"synthetic chat: {spec.sessions} sessions, turns {spec.turns}, input {spec.input_len}, "
        f"output {spec.output_len}, think {spec.think}, {words} system prompt {spec.system_len}"
    )
    return Trace(source, tuple(sessions))


def with_arrivals(trace: Trace, kind: str, rate: float, seed: Sequence[int]) -> Trace:
    """The same sessions arriving at `rate` per second. The gaps of all rates are proportional."""
    rng = np.random.default_rng(list(seed))
    times = arrivals(kind, len(trace.sessions), rate, rng)
    sessions = tuple(
        dataclasses.replace(session, arrival_s=at)
        for session, at in zip(trace.sessions, times, strict=True)
    )
    return dataclasses.replace(trace, sessions=sessions)


def with_think(trace: Trace, think: Distribution, seed: Sequence[int]) -> Trace:
    """The same sessions with a pause drawn from `think` before every turn but the first."""
    rng = np.random.default_rng(list(seed))
    sessions = tuple(
        dataclasses.replace(
            session,
            turns=tuple(
                dataclasses.replace(turn, think_s=think.draw(rng) if index else 0.0)
                for index, turn in enumerate(session.turns)
            ),
        )
        for session in trace.sessions
    )
    return dataclasses.replace(trace, sessions=sessions)


def from_zero(trace: Trace) -> Trace:
    """The same trace with its earliest arrival at time 0."""
    start = min(session.arrival_s for session in trace.sessions)
    sessions = tuple(
        dataclasses.replace(
            session,
            arrival_s=session.arrival_s - start,
            turns=tuple(
                turn if turn.at_s is None else dataclasses.replace(turn, at_s=turn.at_s - start)
                for turn in session.turns
            ),
        )
        for session in trace.sessions
    )
    return dataclasses.replace(trace, sessions=sessions)


def clipped(trace: Trace, max_tokens: int) -> Trace:
    """Without the turns whose prompt and reply would exceed `max_tokens`, and those after them.

    What was dropped is said in the notes.
    """
    sessions, dropped = [], 0
    for session in trace.sessions:
        kept = list(itertools.takewhile(lambda size: size <= max_tokens, _sizes(session)))
        dropped += len(session.turns) - len(kept)
        if kept:
            sessions.append(dataclasses.replace(session, turns=session.turns[: len(kept)]))
    if not sessions:
        raise UsageError(
            f"--max-len {max_tokens}: every request of {trace.source} is longer; raise it"
        )
    if not dropped:
        return trace
    note = f"{dropped} of {trace.num_requests} requests dropped: longer than {max_tokens} tokens"
    return Trace(trace.source, tuple(sessions), (*trace.notes, note))


def _sizes(session: Session) -> Iterable[int]:
    size = len(session.system_ids)
    for turn in session.turns:
        size = (0 if turn.whole else size) + len(turn.ids) + turn.output_len
        yield size
