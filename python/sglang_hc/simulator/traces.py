"""Real traces as workloads: Mooncake JSONL, Bailian JSONL, BurstGPT CSV, ShareGPT JSON, and the
record of a server of ours.

Told apart by their contents, not their names. Text is never needed: hash ids say which tokens are
shared, and where a format has text its length is estimated.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hc.simulator.recorded_load import recorded_sessions
from sglang_hc.simulator.workloads import (
    TOKEN_IDS,
    Session,
    Span,
    Turn,
    Workload,
    poisson_arrivals,
)
from sglang_hc.trace import TRACE_VERSION

MOONCAKE_TOKENS = 512
BAILIAN_TOKENS = 16
"""Tokens one hash id of the trace stands for."""
CHARACTERS_PER_TOKEN = 4.0
"""Estimate for ShareGPT, whose files hold text and no token counts."""

_FRESH = TOKEN_IDS // 2
"""Token ids below belong to hash ids, those above are given out once."""


class TraceError(ValueError):
    """A trace that cannot be read. The message names the file, the place and what was expected."""


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
        text = path.read_text(encoding="utf-8-sig")
    except OSError as cause:
        raise TraceError(f"{path}: {cause.strerror or cause}") from cause
    except UnicodeDecodeError as cause:
        raise TraceError(f"{path}: not a UTF-8 text file") from cause
    sessions = _reader(path, text)(path, text, timing)
    if not any(session.turns for session in sessions):
        raise TraceError(f"{path}: holds no request with a prompt")
    start = min(session.arrival for session in sessions)
    shifted = tuple(
        Session(
            s.arrival - start,
            tuple(
                Turn(t.spans, t.output, t.think, None if t.at is None else t.at - start)
                for t in s.turns
            ),
            s.whole,
        )
        for s in sessions
        if s.turns
    )
    return Workload(path.name, shifted)


Reader = Callable[[Path, str, Timing], list[Session]]


def _reader(path: Path, text: str) -> Reader:
    start = text.lstrip()[:1]
    if start == "[":
        return _sharegpt
    if start == "{":
        first = _json_lines(path, text.lstrip().split("\n", 1)[0])[0][1]
        if first.get("trace") == "sglang-hc":
            return _recorded
        return _bailian if "chat_id" in first else _mooncake
    if "Request tokens" in text.split("\n", 1)[0]:
        return _burstgpt
    raise TraceError(
        f"{path}: not a trace this tool knows: a record of --hc-trace, Mooncake or Bailian JSONL, "
        "BurstGPT CSV (with its header) or ShareGPT JSON"
    )


def _recorded(path: Path, text: str, timing: Timing) -> list[Session]:
    """What a server of ours recorded; its requests at their times."""
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]  # the server was ended while it wrote a line
    rows = _json_lines(path, text)
    if rows[0][1].get("version") != TRACE_VERSION:
        raise TraceError(f"{path}: version {rows[0][1].get('version')} of a record is not known")
    try:
        return recorded_sessions(rows, _Fresh().span)
    except (KeyError, TypeError, ValueError) as cause:
        raise TraceError(f"{path}: a record that does not fit together ({cause!r})") from cause


def _mooncake(path: Path, text: str, timing: Timing) -> list[Session]:
    """{"timestamp": ms, "input_length", "output_length", "hash_ids"}; a line is a session."""
    fresh = _Fresh()
    sessions = []
    for where, row in _json_lines(path, text):
        time = _number(row, "timestamp", where) / 1000
        turn = _hashed(row, where, MOONCAKE_TOKENS, fresh)
        sessions.append(Session(time, (turn,), whole=True))
    return sessions


def _bailian(path: Path, text: str, timing: Timing) -> list[Session]:
    """As Mooncake with 16 tokens an id and seconds; parent_chat_id links turns, -1 starts one.

    A session is a root and its descendants by time; a turn waits for the answer to the one before.
    """
    fresh = _Fresh()
    root_of: dict[object, object] = {}
    turns: dict[object, list[Turn]] = {}
    for where, row in sorted(
        _json_lines(path, text), key=lambda item: _number(item[1], "timestamp", item[0])
    ):
        chat, parent = _field(row, "chat_id", where), _field(row, "parent_chat_id", where)
        root = chat if parent in (-1, "-1") else root_of.get(parent, parent)
        root_of[chat] = root
        turn = _hashed(row, where, BAILIAN_TOKENS, fresh)
        time = _number(row, "timestamp", where)
        turns.setdefault(root, []).append(Turn(turn.spans, turn.output, 0.0, time))
    return [Session(talk[0].at or 0.0, tuple(talk), whole=True) for talk in turns.values()]


def _burstgpt(path: Path, text: str, timing: Timing) -> list[Session]:
    """Timestamp, [Session ID,] Request tokens, Response tokens. Rows of one session are its turns.

    Request tokens are taken as what the turn adds to its conversation.
    """
    fresh = _Fresh()
    rows: dict[str, list[tuple[float, Turn]]] = {}
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
        where = f"{path}:{number}"
        time = _number(row, "Timestamp", where)
        asked = int(_number(row, "Request tokens", where))
        answered = int(_number(row, "Response tokens", where))
        if asked < 1:
            continue  # failed requests are logged with no tokens
        turn = Turn((fresh.span(asked),), fresh.span(answered), 0.0, time)
        rows.setdefault(row.get("Session ID") or f"row {number}", []).append((time, turn))
    sessions = []
    for talk in rows.values():
        talk.sort(key=lambda item: item[0])
        sessions.append(Session(talk[0][0], tuple(turn for _, turn in talk)))
    return sessions


def _sharegpt(path: Path, text: str, timing: Timing) -> list[Session]:
    """[{"conversations": [{"from": "human"|"gpt", "value": str}, ...]}]; arrivals by `timing`."""
    try:
        data = json.loads(text)
    except ValueError as cause:
        raise TraceError(f"{path}: not JSON ({cause})") from cause
    fresh = _Fresh()
    arrivals = poisson_arrivals(random.Random(timing.seed), timing.rate or 1.0)
    sessions = []
    for number, item in enumerate(data):
        where = f"{path}: conversation {number}"
        talk = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(talk, list):
            raise TraceError(f'{where}: expected {{"conversations": [...]}}')
        turns: list[Turn] = []
        asked = 0
        for part in talk:
            who, value = _speaker(part, where)
            tokens = max(1, round(len(value) / CHARACTERS_PER_TOKEN))
            if who in ("human", "user", "system"):
                asked += tokens
            elif asked:
                think = timing.think if turns else 0.0
                turns.append(Turn((fresh.span(asked),), fresh.span(tokens), think))
                asked = 0
        if turns:
            sessions.append(Session(next(arrivals), tuple(turns)))
    return sessions


def _speaker(part: object, where: str) -> tuple[str, str]:
    if isinstance(part, dict):
        who, value = part.get("from"), part.get("value")
        if isinstance(who, str) and isinstance(value, str):
            return who, value
    raise TraceError(f'{where}: expected {{"from": ..., "value": text}}, got {part!r:.80}')


class _Fresh:
    """Token ids that nothing else uses."""

    def __init__(self) -> None:
        self._next = _FRESH

    def span(self, length: int) -> Span:
        span = Span(self._next, length)
        self._next = _FRESH + (self._next - _FRESH + length) % _FRESH
        return span


def _hashed(row: dict[str, Any], where: str, tokens_per_id: int, fresh: _Fresh) -> Turn:
    ids = _field(row, "hash_ids", where)
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise TraceError(f"{where}: hash_ids must be a list of integers from 0 on")
    asked = int(_number(row, "input_length", where))
    covered = len(ids) * tokens_per_id
    if not covered - tokens_per_id < asked <= covered and (ids or asked):
        raise TraceError(
            f"{where}: input_length {asked} does not fit {len(ids)} hash_ids of {tokens_per_id} "
            "tokens each"
        )
    spans = []
    for index, number in enumerate(ids):
        length = min(tokens_per_id, asked - index * tokens_per_id)
        spans.append(Span(number * tokens_per_id % _FRESH, length))
    return Turn(tuple(spans), fresh.span(int(_number(row, "output_length", where))))


def _json_lines(path: Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as cause:
            raise TraceError(f"{where}: not JSON ({cause})") from cause
        if not isinstance(row, dict):
            raise TraceError(f"{where}: expected a JSON object per line")
        rows.append((where, row))
    return rows


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    if row.get(name) is None:
        raise TraceError(f"{where}: has no {name}")
    return row[name]


def _number(row: dict[str, Any], name: str, where: str) -> float:
    value = _field(row, name, where)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TraceError(f"{where}: {name} must be a number, got {value!r}") from None
    if not 0 <= number < 1e15:
        raise TraceError(f"{where}: {name} must not be negative or absurd, got {value!r}")
    return number
