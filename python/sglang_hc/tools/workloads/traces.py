"""One reader per public trace format: Mooncake and Bailian JSONL, BurstGPT CSV, ShareGPT JSON.

A reader gives what the file says, as `TraceSession`s; the benchmarks turn that into requests with
token ids, the simulator into spans. Every error names the file, the place in it and what was
expected there.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")

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

Number = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
HashId = Annotated[int, msgspec.Meta(ge=0)]


class _MooncakeRow(msgspec.Struct):
    timestamp: Number
    input_length: Number
    output_length: Number
    hash_ids: list[HashId]

    def turn(self, where: str, tokens_per_id: int, at: float) -> TraceTurn:
        asked, covered = int(self.input_length), len(self.hash_ids) * tokens_per_id
        if not covered - tokens_per_id < asked <= covered and (self.hash_ids or asked):
            raise TraceError(
                f"{where}: input_length {asked} does not fit {len(self.hash_ids)} hash_ids of "
                f"{tokens_per_id} tokens each"
            )
        prompt = HashedPrompt(tuple(self.hash_ids), tokens_per_id, asked)
        return TraceTurn(prompt, int(self.output_length), at)


class _BailianRow(_MooncakeRow):
    chat_id: int | str
    parent_chat_id: int | str


class _BurstRow(msgspec.Struct):
    at: Number = msgspec.field(name="Timestamp")
    asked: Number = msgspec.field(name="Request tokens")
    answered: Number = msgspec.field(name="Response tokens")
    session: str = msgspec.field(name="Session ID", default="")


class _Message(msgspec.Struct):
    who: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Message]
    id: int | str | None = None


def mooncake(path: Path) -> Iterator[TraceSession]:
    """{"timestamp": ms, "input_length", "output_length", "hash_ids"}; a line is a session.

    The format has no links between turns: prefixes are shared through equal ids.
    """
    for where, row in json_lines(path, _MooncakeRow):
        yield TraceSession(where, [row.turn(where, MOONCAKE_TOKENS, row.timestamp / 1000)])


def bailian(path: Path) -> Iterator[TraceSession]:
    """As Mooncake with 16 tokens an id and seconds; parent_chat_id links turns, -1 starts one.

    A session is a root and its descendants by time.
    """
    root_of: dict[int | str, int | str] = {}
    sessions: dict[int | str, TraceSession] = {}
    for where, row in sorted(json_lines(path, _BailianRow), key=lambda item: item[1].timestamp):
        chat, parent = row.chat_id, row.parent_chat_id
        root = chat if parent in (-1, "-1") else root_of.get(parent, parent)
        root_of[chat] = root
        turn = row.turn(where, BAILIAN_TOKENS, row.timestamp)
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
        for line, columns in enumerate(table, 2):
            row = _converted(columns, _BurstRow, f"{path}:{line}")
            if row.asked >= 1:
                name = row.session or f"row {line}"
                turn = TraceTurn(int(row.asked), int(row.answered), row.at)
                sessions.setdefault(name, TraceSession(name, [])).turns.append(turn)
    for session in sessions.values():
        session.turns.sort(key=lambda turn: turn.at or 0.0)
        yield session


def sharegpt(path: Path) -> Iterator[TraceSession]:
    """[{"conversations": [{"from": "human"|"gpt", "value": str}, ...]}].

    What comes before an answer was asked with it; what is never answered is left out.
    """
    text = path.read_text(encoding="utf-8-sig")
    for number, talk in enumerate(json_value(text, list[_Conversation], str(path))):
        session = TraceSession(str(number if talk.id is None else talk.id), [])
        asked: list[str] = []
        for part in talk.conversations:
            if part.who in ("human", "user", "system"):
                asked.append(part.value)
            elif asked:
                session.turns.append(TraceTurn(tuple(asked), part.value))
                asked = []
        yield session


def _of_text(reader: Reader) -> Reader:
    """A reader that also refuses, with TraceError, a file that is no text or no table."""

    def read(path: Path) -> Iterator[TraceSession]:
        try:
            yield from reader(path)
        except UnicodeDecodeError:
            raise TraceError(f"{path}: not a UTF-8 text file") from None
        except csv.Error as error:
            raise TraceError(f"{path}: not a trace of this format ({error})") from None

    return read


READERS: dict[str, Reader] = {
    "mooncake": _of_text(mooncake),
    "bailian": _of_text(bailian),
    "burstgpt": _of_text(burstgpt),
    "sharegpt": _of_text(sharegpt),
}


def json_lines(path: Path, kind: type[T]) -> Iterator[tuple[str, T]]:
    """(`path:line`, value) of each line that is not blank. Raises TraceError and OSError."""
    with open(path, encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if text.strip():
                yield f"{path}:{line}", json_value(text, kind, f"{path}:{line}")


def json_object(text: str, where: str) -> dict[str, Any]:
    """One JSON object. Raises TraceError."""
    return json_value(text, dict[str, Any], where)


def json_value(text: str, kind: type[T], where: str) -> T:
    """A value of `kind` from one JSON text; where: the place in the file. Raises TraceError."""
    try:
        values = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON ({str(error)[:200]})") from None
    return _converted(values, kind, where)


def _converted(values: object, kind: type[T], where: str) -> T:
    """Numbers may be written as strings, as in a CSV file."""
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise TraceError(f"{where}: {error}") from None
