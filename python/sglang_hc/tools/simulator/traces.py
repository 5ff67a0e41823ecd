"""Real traces as workloads: the public formats, and the record of a server of ours.

Told apart by their contents, not their names. Text is never needed: hash ids say which tokens are
shared, and where a format has text its length is estimated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_hc.tools.simulator.recorded import recorded_sessions
from sglang_hc.tools.simulator.workloads import poisson_arrivals
from sglang_hc.tools.workloads.sessions import TOKEN_IDS, FreshIds, Session, Span, Turn, Workload
from sglang_hc.tools.workloads.traces import (
    READERS,
    HashedPrompt,
    TraceError,
    TraceSession,
    TraceTurn,
    json_object,
)

CHARACTERS_PER_TOKEN = 4.0
"""Estimate for ShareGPT, whose files hold text and no token counts."""

_FRESH = TOKEN_IDS // 2
"""Token ids below belong to hash ids, those above are given out once."""


@dataclass(frozen=True)
class Timing:
    """For formats without times: sessions per second, seconds between turns, seed of the arrivals.

    rate None: what the trace itself says, or 1 per second.
    """

    rate: float | None = None
    think: float = 0.0
    seed: int = 0


def read_trace(path: Path, timing: Timing) -> Workload:
    """Workload from a trace file. Raises TraceError."""
    try:
        kind = _kind_of(path)
        if kind == "sglang-hc":
            sessions = recorded_sessions(path)
        else:
            sessions = list(_sessions(READERS[kind](path), timing))
    except OSError as cause:
        raise TraceError(f"{path}: {cause.strerror or cause}") from cause
    except UnicodeDecodeError as cause:
        raise TraceError(f"{path}: not a UTF-8 text file") from cause
    sessions = [session for session in sessions if session.turns]
    if not sessions:
        raise TraceError(f"{path}: holds no request with a prompt")
    start = min(session.arrival for session in sessions)
    return Workload(path.name, tuple(session.moved(start) for session in sessions))


def _kind_of(path: Path) -> str:
    """A key of READERS, or `sglang-hc` for a record of a server."""
    with open(path, encoding="utf-8-sig") as file:
        line = next((text for text in file if text.strip()), "")
    start = line.lstrip()[:1]
    if start == "[":
        return "sharegpt"
    if start == "{":
        first = json_object(line, f"{path}:1")
        if first.get("trace") == "sglang-hc":
            return "sglang-hc"
        return "bailian" if "chat_id" in first else "mooncake"
    if "Request tokens" in line:
        return "burstgpt"
    raise TraceError(
        f"{path}: not a trace this tool knows: a record of --hc-trace, Mooncake or Bailian JSONL, "
        "BurstGPT CSV (with its header) or ShareGPT JSON"
    )


def _sessions(found: Iterator[TraceSession], timing: Timing) -> Iterator[Session]:
    """Sessions of a public format. Those without times arrive by `timing`."""
    fresh = FreshIds(_FRESH)
    arrivals = poisson_arrivals(random.Random(timing.seed), timing.rate or 1.0)
    for session in found:
        turns = [
            _turn(turn, fresh, timing.think if i else 0.0) for i, turn in enumerate(session.turns)
        ]
        if turns:
            arrival = turns[0].at
            whole = isinstance(session.turns[0].asked, HashedPrompt)
            yield Session(next(arrivals) if arrival is None else arrival, tuple(turns), whole)


def _turn(turn: TraceTurn, fresh: FreshIds, think: float) -> Turn:
    if isinstance(turn.asked, HashedPrompt):
        spans = _hashed(turn.asked)
    else:
        spans = (fresh.span(_tokens(turn.asked)),)
    return Turn(
        spans, fresh.span(_tokens(turn.answered)), think if turn.at is None else 0.0, turn.at
    )


def _tokens(said: int | str | tuple[str, ...]) -> int:
    """What a turn of a conversation adds: the count that the file gives, or an estimate."""
    if isinstance(said, int):
        return said
    parts = (said,) if isinstance(said, str) else said
    return sum(max(1, round(len(part) / CHARACTERS_PER_TOKEN)) for part in parts)


def _hashed(prompt: HashedPrompt) -> tuple[Span, ...]:
    step = prompt.tokens_per_id
    return tuple(
        Span(number * step % _FRESH, min(step, prompt.tokens - index * step))
        for index, number in enumerate(prompt.ids)
    )
