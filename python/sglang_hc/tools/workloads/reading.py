"""Files as loads: the public trace formats, and what a server of ours recorded.

Told apart by their contents, not their names.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from sglang_hc.tools.workloads.recorded import recorded_sessions
from sglang_hc.tools.workloads.sessions import Session, Workload, poisson_arrivals
from sglang_hc.tools.workloads.traces import (
    READERS,
    Encode,
    TokenIds,
    TraceError,
    json_object,
)

RECORDED = "sglang-hc"
"""Names the format of a server's own trace, beside those of READERS."""


@dataclass(frozen=True)
class Timing:
    """For formats without times: sessions per second, seconds between turns, seed of the arrivals.

    rate None: what the trace itself says, or 1 per second.
    """

    rate: float | None = None
    think: float = 0.0
    seed: int = 0


def read_trace(
    path: Path,
    timing: Timing,
    encode: Encode | None = None,
    limit: int | None = None,
    *,
    closed_loop: bool = False,
) -> Workload:
    """Workload from a trace file; its earliest session arrives at 0. encode: for formats with
    text, whose lengths are estimated without it. limit: sessions that are read, None for all.
    closed_loop: see `recorded_sessions`; in other formats later turns wait for earlier answers
    anyway. Raises TraceError."""
    try:
        kind = _kind_of(path)
        if kind == RECORDED:
            sessions = recorded_sessions(path, closed_loop=closed_loop)[:limit]
        else:
            found = READERS[kind](path, TokenIds(encode))
            sessions = list(islice(_arriving(found, timing), limit))
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


def _arriving(found: Iterator[Session], timing: Timing) -> Iterator[Session]:
    """Those of a public format that ask something. Without times they arrive by `timing`."""
    arrivals = poisson_arrivals(random.Random(timing.seed), timing.rate or 1.0)
    for session in found:
        turns = [turn for turn in session.turns if turn.new_tokens]
        if not turns:
            continue
        arrival = turns[0].at
        if arrival is None:
            arrival = next(arrivals)
            turns[1:] = (replace(turn, think=timing.think) for turn in turns[1:])
        yield replace(session, arrival=arrival, turns=tuple(turns))
