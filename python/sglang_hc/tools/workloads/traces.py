"""One reader per public trace format: Mooncake and Bailian JSONL, BurstGPT CSV, ShareGPT JSON.

A reader gives what the file says, as `TraceSession`s; the benchmarks turn that into requests with
token ids, the simulator into spans. Every error names the file, the place in it and what was
expected there.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MOONCAKE_TOKENS = 512
BAILIAN_TOKENS = 16
"""Tokens that one hash id of the trace stands for."""


class TraceError(ValueError):
    """A trace that cannot be read. The message names the file, the place and what was expected."""


class HashedPrompt(NamedTuple):
    """A whole prompt of `tokens` tokens; equal ids stand for equal text.

    Id i covers tokens [i * tokens_per_id, (i + 1) * tokens_per_id) of the prompt.
    """

    ids: tuple[int, ...]
    tokens_per_id: int
    tokens: int


class TraceTurn(NamedTuple):
    """One request of a session.

    asked: its whole prompt by hashes, or the number of tokens that the file gives for the request,
    or the messages that the user added. answered: tokens, or the text of the answer. at: seconds on
    the trace's own clock; None where the format has no times.
    """

    asked: HashedPrompt | int | tuple[str, ...]
    answered: int | str
    at: float | None = None


class TraceSession(NamedTuple):
    """Turns of one user, in order."""

    name: str
    turns: list[TraceTurn]


Reader = Callable[[Path], Iterator[TraceSession]]
"""Sessions of a file, lazily where the format allows it. Raises TraceError and OSError."""


def mooncake(path: Path) -> Iterator[TraceSession]:
    """{"timestamp": ms, "input_length", "output_length", "hash_ids"}; a line is a session.

    The format has no links between turns: prefixes are shared through equal ids.
    """
    for where, row in json_lines(path):
        at = number_in(row, "timestamp", where) / 1000
        yield TraceSession(where, [_hashed(row, where, MOONCAKE_TOKENS, at)])


def bailian(path: Path) -> Iterator[TraceSession]:
    """As Mooncake with 16 tokens an id and seconds; parent_chat_id links turns, -1 starts one.

    A session is a root and its descendants by time.
    """
    root_of: dict[object, object] = {}
    sessions: dict[object, TraceSession] = {}
    rows = sorted(json_lines(path), key=lambda item: number_in(item[1], "timestamp", item[0]))
    for where, row in rows:
        chat, parent = field_in(row, "chat_id", where), field_in(row, "parent_chat_id", where)
        root = chat if parent in (-1, "-1") else root_of.get(parent, parent)
        root_of[chat] = root
        turn = _hashed(row, where, BAILIAN_TOKENS, number_in(row, "timestamp", where))
        sessions.setdefault(root, TraceSession(str(root), [])).turns.append(turn)
    yield from sessions.values()


def burstgpt(path: Path) -> Iterator[TraceSession]:
    """Timestamp, [Session ID,] Request tokens, Response tokens; rows of one session are its turns.

    Rows without request tokens are failures and left out. Sessions need the Session ID column of
    version 1.2 and later; without it each row is a session.
    """
    sessions: dict[str, TraceSession] = {}
    with open(path, newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(file)
        needed = ("Timestamp", "Request tokens", "Response tokens")
        missing = [name for name in needed if name not in (table.fieldnames or ())]
        if missing:
            raise TraceError(
                f"{path}: no column {', '.join(missing)} in the header; expected "
                f"{', '.join(needed)} and Session ID"
            )
        for line, row in enumerate(table, 2):
            at, asked, answered = (number_in(row, name, f"{path}:{line}") for name in needed)
            if asked >= 1:
                name = row.get("Session ID") or f"row {line}"
                turn = TraceTurn(int(asked), int(answered), at)
                sessions.setdefault(name, TraceSession(name, [])).turns.append(turn)
    for session in sessions.values():
        session.turns.sort(key=lambda turn: turn.at or 0.0)
        yield session


def sharegpt(path: Path) -> Iterator[TraceSession]:
    """[{"conversations": [{"from": "human"|"gpt", "value": str}, ...]}].

    What comes before an answer was asked with it; what is never answered is left out.
    """
    for number, item in enumerate(json_list(path)):
        where = f"{path}: conversation {number}"
        talk = item.get("conversations")
        if not isinstance(talk, list):
            raise TraceError(f'{where}: expected {{"conversations": [...]}}')
        session = TraceSession(str(item.get("id", number)), [])
        asked: list[str] = []
        for part in talk:
            who, text = _speaker(part, where)
            if who in ("human", "user", "system"):
                asked.append(text)
            elif asked:
                session.turns.append(TraceTurn(tuple(asked), text))
                asked = []
        yield session


READERS: dict[str, Reader] = {
    "mooncake": mooncake,
    "bailian": bailian,
    "burstgpt": burstgpt,
    "sharegpt": sharegpt,
}


def json_list(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON list. Raises TraceError and OSError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as cause:
        raise TraceError(f"{path}: not JSON ({cause})") from cause
    if not isinstance(value, list):
        raise TraceError(f"{path}: expected a JSON list of objects, got {type(value).__name__}")
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise TraceError(f"{path}: conversation {number}: expected a JSON object")
    return value


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`path:line`, object) of each line that is not blank. Raises TraceError and OSError."""
    with open(path, encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if text.strip():
                yield f"{path}:{line}", json_object(text, f"{path}:{line}")


def json_object(text: str, where: str) -> dict[str, Any]:
    """One JSON object. Raises TraceError."""
    try:
        row = json.loads(text)
    except ValueError as cause:
        raise TraceError(f"{where}: not JSON ({cause})") from cause
    if not isinstance(row, dict):
        raise TraceError(f"{where}: expected a JSON object per line")
    return row


def field_in(row: dict[str, Any], name: str, where: str) -> Any:
    """A field that must be there. Raises TraceError."""
    if row.get(name) is None:
        raise TraceError(f"{where}: has no {name}")
    return row[name]


def number_in(row: dict[str, Any], name: str, where: str) -> float:
    """A field that must be a number, not negative. Raises TraceError."""
    value = field_in(row, name, where)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TraceError(f"{where}: {name} must be a number, got {value!r}") from None
    if not 0 <= number < 1e15:
        raise TraceError(f"{where}: {name} must not be negative or absurd, got {value!r}")
    return number


def _hashed(row: dict[str, Any], where: str, tokens_per_id: int, at: float) -> TraceTurn:
    ids = field_in(row, "hash_ids", where)
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise TraceError(f"{where}: hash_ids must be a list of integers from 0 on")
    asked = int(number_in(row, "input_length", where))
    covered = len(ids) * tokens_per_id
    if not covered - tokens_per_id < asked <= covered and (ids or asked):
        raise TraceError(
            f"{where}: input_length {asked} does not fit {len(ids)} hash_ids of {tokens_per_id} "
            "tokens each"
        )
    answered = int(number_in(row, "output_length", where))
    return TraceTurn(HashedPrompt(tuple(ids), tokens_per_id, asked), answered, at)


def _speaker(part: object, where: str) -> tuple[str, str]:
    if isinstance(part, dict):
        who, value = part.get("from"), part.get("value")
        if isinstance(who, str) and isinstance(value, str):
            return who, value
    raise TraceError(f'{where}: expected {{"from": ..., "value": text}}, got {part!r:.80}')
