"""Files as loads: the public trace formats, and what a server of ours recorded.

Told apart by their contents, not their names. Hash ids say which tokens are shared. Where a format
has text, its length is estimated, unless a tokenizer is at hand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sglang_hc.tools.workloads.recorded import recorded_sessions
from sglang_hc.tools.workloads.sessions import (
    TOKEN_IDS,
    FreshIds,
    Ids,
    Said,
    Session,
    Span,
    Turn,
    Workload,
    poisson_arrivals,
)
from sglang_hc.tools.workloads.traces import (
    READERS,
    HashedPrompt,
    TraceError,
    TraceSession,
    TraceTurn,
    json_object,
)
from sglang_hc.tree.identity import pack_tokens

CHARACTERS_PER_TOKEN = 4.0
"""Estimate for ShareGPT, whose files hold text and no token counts."""

RECORDED = "sglang-hc"
"""Names the format of a server's own trace, beside those of READERS."""

_FRESH = TOKEN_IDS // 2
"""Token ids below belong to hash ids, those above are given out once."""

Encode = Callable[[str], list[int]]
"""Token ids of a text."""


@dataclass(frozen=True)
class Timing:
    """For formats without times: sessions per second, seconds between turns, seed of the arrivals.

    rate None: what the trace itself says, or 1 per second.
    """

    rate: float | None = None
    think: float = 0.0
    seed: int = 0


def read_trace(
    path: Path, timing: Timing, encode: Encode | None = None, limit: int | None = None
) -> Workload:
    """Workload from a trace file; its earliest session arrives at 0. encode: for formats with
    text, whose lengths are estimated without it. limit: sessions that are read, None for all.
    Raises TraceError."""
    try:
        kind = _kind_of(path)
        if kind == RECORDED:
            sessions = recorded_sessions(path)[:limit]
        else:
            sessions = list(islice(_sessions(READERS[kind](path), timing, encode), limit))
    except OSError as cause:
        raise TraceError(f"{path}: {cause.strerror or cause}") from cause
    except UnicodeDecodeError as cause:
        raise TraceError(f"{path}: not a UTF-8 text file") from cause
    if not sessions:
        raise TraceError(f"{path}: holds no request with a prompt")
    start = min(session.arrival for session in sessions)
    return Workload(path.name, tuple(session.moved(start) for session in sessions))


def _kind_of(path: Path) -> str:
    """A key of READERS, or RECORDED."""
    with open(path, encoding="utf-8-sig") as file:
        line = next((text for text in file if text.strip()), "")
    start = line.lstrip()[:1]
    if start == "[":
        return "sharegpt"
    if start == "{":
        first = json_object(line, f"{path}:1")
        if first.get("trace") == RECORDED:
            return RECORDED
        return "bailian" if "chat_id" in first else "mooncake"
    if "Request tokens" in line:
        return "burstgpt"
    raise TraceError(
        f"{path}: not a trace this tool knows: a record of --hc-trace, Mooncake or Bailian JSONL, "
        "BurstGPT CSV (with its header) or ShareGPT JSON"
    )


def _sessions(
    found: Iterator[TraceSession], timing: Timing, encode: Encode | None
) -> Iterator[Session]:
    """Sessions of a public format. Those without times arrive by `timing`."""
    fresh = FreshIds(_FRESH)
    arrivals = poisson_arrivals(random.Random(timing.seed), timing.rate or 1.0)
    for session in found:
        turns: list[Turn] = []
        so_far = 0
        for turn in session.turns:
            said, answer = _said(turn, so_far, fresh, encode), _text(turn.answered, fresh, encode)
            think = timing.think if turns and turn.at is None else 0.0
            made = Turn(said, answer, think, turn.at)
            if made.new_tokens:
                turns.append(made)
                so_far += made.new_tokens + answer.length
        if turns:
            arrival = turns[0].at
            whole = isinstance(session.turns[0].asked, HashedPrompt)
            yield Session(next(arrivals) if arrival is None else arrival, tuple(turns), whole)


def _said(turn: TraceTurn, so_far: int, fresh: FreshIds, encode: Encode | None) -> tuple[Said, ...]:
    """What a turn adds to a conversation of `so_far` tokens, or its whole prompt by hashes."""
    asked = turn.asked
    if isinstance(asked, HashedPrompt):
        return _hashed(asked)
    if isinstance(asked, int):
        # A prompt that covers the session so far contains it; any other is new in whole.
        return (fresh.span(asked - so_far if asked > so_far else asked),)
    return tuple(_text(part, fresh, encode) for part in asked)


def _text(said: int | str, fresh: FreshIds, encode: Encode | None) -> Said:
    """The count that the file gives, the tokens of a text, or an estimate of how many it has."""
    if isinstance(said, int):
        return fresh.span(said)
    if encode is not None:
        return Ids(pack_tokens(encode(said)))
    return fresh.span(max(1, round(len(said) / CHARACTERS_PER_TOKEN)))


def _hashed(prompt: HashedPrompt) -> tuple[Span, ...]:
    step = prompt.tokens_per_id
    return tuple(
        Span(number * step % _FRESH, min(step, prompt.tokens - index * step))
        for index, number in enumerate(prompt.ids)
    )
