"""What is asked, generated from a seed, and as the token ids of a model.

A workload is fixed before any server sees it, so every arm answers the same requests at the same
times. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.workloads.sessions import FreshIds, Ids, Said, Session, Span, Turn, Workload

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
    """The token ids that prompts are made of: 0..size-1 without `special`."""

    size: int
    special: frozenset[int] = frozenset()

    def spoken(self, workload: Workload, seed: Sequence[int]) -> Workload:
        """The same workload with token ids for its spans, and for ids that are none of these: equal
        where they were equal, and with another seed different."""
        allowed = np.setdiff1d(np.arange(self.size, dtype=np.int64), list(self.special))
        key = np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)[0]

        def ids(said: Said) -> Ids:
            values = unpacked(said)
            drawn = allowed[_mixed(values.astype(np.uint64) + key) % np.uint64(len(allowed))]
            if isinstance(said, Ids):
                drawn = np.where(values < self.size, values, drawn)
            return Ids(drawn.astype(">i4").tobytes())

        def turn(one: Turn) -> Turn:
            return replace(one, said=tuple(map(ids, one.said)))

        sessions = (replace(s, turns=tuple(map(turn, s.turns))) for s in workload.sessions)
        return replace(workload, sessions=tuple(sessions))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Numbers that look random, equal for equal ones (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))


def unpacked(said: Said) -> np.ndarray:
    """Token ids, int64."""
    return np.frombuffer(said.packed, dtype=">i4").astype(np.int64)


class History:
    """What one session has said so far: the ids of its next prompt."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.ids: list[int] = []

    @property
    def free_end(self) -> bool:
        """Whether a reply ends where the model ends it."""
        return self._session.end_id is not None

    def ask(self, turn: Turn) -> None:
        """Append the user's part of a turn."""
        said = [token for part in turn.said for token in unpacked(part).tolist()]
        self.ids = said if self._session.whole else self.ids + said

    def answer(self, reply: Sequence[int]) -> None:
        """Append the exact ids that were generated, with the end that was cut off."""
        self.ids = [*self.ids, *reply]
        end = self._session.end_id
        if end is not None and (not reply or reply[-1] != end):
            self.ids.append(end)


def prompt_ids(session: Session, turn: int, outputs: Sequence[Sequence[int]]) -> list[int]:
    """Exact prompt of one request, given the output ids of the session's earlier turns."""
    history = History(session)
    for before, output in zip(session.turns[:turn], outputs, strict=False):
        history.ask(before)
        history.answer(output)
    history.ask(session.turns[turn])
    return history.ids


def is_timed(workload: Workload) -> bool:
    """Whether it brings its own times of arrival."""
    return any(turn.at is not None for s in workload.sessions for turn in s.turns)


def longest_prompt(workload: Workload) -> int:
    """Tokens of the longest prompt, replies counted at their full length."""
    return max(
        size - turn.answer.length
        for session in workload.sessions
        for size, turn in zip(_sizes(session), session.turns, strict=True)
    )


def warm_up(count: int, prompt_len: int) -> Workload:
    """`count` requests of `prompt_len` tokens that share none."""
    fresh = FreshIds()
    turns = [Turn((fresh.span(prompt_len),), Span(0, 4)) for _ in range(count)]
    return Workload("warm-up", tuple(Session(0.0, (turn,)) for turn in turns))


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


def synthetic_chat(spec: ChatSpec, seed: Sequence[int]) -> Workload:
    """Chat of `spec`, with a system prompt before the first turn; a seed fixes its lengths."""
    rng, fresh = np.random.default_rng(list(seed)), FreshIds()
    shared = fresh.span(spec.system_len)
    sessions = []
    for _ in range(spec.sessions):
        turns = [
            Turn(
                (fresh.span(spec.input_len.draw_count(rng)),),
                fresh.span(spec.output_len.draw_count(rng)),
                spec.think.draw(rng) if index else 0.0,
            )
            for index in range(spec.turns.draw_count(rng))
        ]
        system = shared if spec.system_shared else fresh.span(spec.system_len)
        turns[0] = replace(turns[0], said=(system, *turns[0].said))
        sessions.append(Session(0.0, tuple(turns)))
    words = "shared" if spec.system_shared else "own"
    return Workload(
        f"synthetic chat: {spec.sessions} sessions, turns {spec.turns}, input {spec.input_len}, "
        f"output {spec.output_len}, think {spec.think}, {words} system prompt {spec.system_len}",
        tuple(sessions),
    )


def with_arrivals(workload: Workload, kind: str, rate: float, seed: Sequence[int]) -> Workload:
    """The same sessions arriving at `rate` per second. The gaps of all rates are proportional."""
    rng = np.random.default_rng(list(seed))
    times = arrivals(kind, len(workload.sessions), rate, rng)
    timed = zip(workload.sessions, times, strict=True)
    return replace(workload, sessions=tuple(replace(s, arrival=at) for s, at in timed))


def with_think(workload: Workload, think: Distribution, seed: Sequence[int]) -> Workload:
    """The same sessions with a pause drawn from `think` before every turn but the first."""
    rng = np.random.default_rng(list(seed))

    def paused(session: Session) -> Session:
        first, *others = session.turns
        return replace(session, turns=(first, *(replace(t, think=think.draw(rng)) for t in others)))

    return replace(workload, sessions=tuple(map(paused, workload.sessions)))


def clipped(workload: Workload, max_tokens: int) -> Workload:
    """Without the turns whose prompt and reply would exceed `max_tokens`, and those after them.

    What was dropped is said in the notes.
    """
    sessions = []
    for session in workload.sessions:
        kept = list(itertools.takewhile(lambda size: size <= max_tokens, _sizes(session)))
        if kept:
            sessions.append(replace(session, turns=session.turns[: len(kept)]))
    if not sessions:
        raise UsageError(
            f"--max-len {max_tokens}: every request of {workload.name} is longer; raise it"
        )
    short = replace(workload, sessions=tuple(sessions))
    dropped = workload.num_turns - short.num_turns
    if not dropped:
        return workload
    note = f"{dropped} of {workload.num_turns} requests dropped: longer than {max_tokens} tokens"
    return replace(short, notes=(*workload.notes, note))


def _sizes(session: Session) -> Iterable[int]:
    size = 0
    for turn in session.turns:
        size = (0 if session.whole else size) + turn.new_tokens + turn.answer.length
        yield size
