"""One reader per public trace format: Mooncake and Bailian JSONL, BurstGPT CSV, ShareGPT JSON.

A reader gives the sessions of a file, those of formats without times at 0. Hash ids say which
tokens are shared; where a format has text, its length is estimated, unless a tokenizer is at hand.
Every error names the file, the place in it and what was expected there.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from sglang_hc.errors import ConfigError
from sglang_hc.tools.workloads.sessions import (
    TOKEN_IDS,
    FreshIds,
    Ids,
    Said,
    Session,
    Span,
    Turn,
)
from sglang_hc.tree.identity import pack_tokens

T = TypeVar("T")

MOONCAKE_TOKENS = 512
BAILIAN_TOKENS = 16
"""Tokens that one hash id of the trace stands for."""

CHARACTERS_PER_TOKEN = 4.0
"""Estimate for ShareGPT, whose files hold text and no token counts."""

_FRESH = TOKEN_IDS // 2
"""Token ids below belong to hash ids, those above are given out once."""


class TraceError(ConfigError):
    """A trace that cannot be read. The message names the file, the place and what was expected."""


Encode = Callable[[str], list[int]]
"""Token ids of a text."""


class TokenIds:
    """Of what a trace names by hashes, by a count, or by its text."""

    def __init__(self, encode: Encode | None = None) -> None:
        """encode: None where lengths of texts are estimated."""
        self._fresh = FreshIds(_FRESH)
        self._encode = encode

    def hashed(self, hashes: Sequence[int], step: int, tokens: int) -> tuple[Span, ...]:
        """A prompt of so many tokens; equal hashes stand for equal text, of `step` tokens each but
        for the last."""
        return tuple(
            Span(number * step % _FRESH, min(step, tokens - index * step))
            for index, number in enumerate(hashes)
        )

    def fresh(self, tokens: int) -> Span:
        """So many tokens that nobody shares."""
        return self._fresh.span(tokens)

    def of_text(self, text: str) -> Said:
        """Those of a text, or an estimate of how many it has."""
        if self._encode is not None:
            return Ids(pack_tokens(self._encode(text)))
        return self.fresh(max(1, round(len(text) / CHARACTERS_PER_TOKEN)))


Reader = Callable[[Path, TokenIds], Iterator[Session]]
"""Sessions of a file, lazily where the format allows it. Raises TraceError and OSError."""

Number = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
HashId = Annotated[int, msgspec.Meta(ge=0)]


class _MooncakeRow(msgspec.Struct):
    timestamp: Number
    input_length: Number
    output_length: Number
    hash_ids: list[HashId]

    def turn(self, where: str, tokens_per_id: int, at: float, ids: TokenIds) -> Turn:
        asked, covered = int(self.input_length), len(self.hash_ids) * tokens_per_id
        if not covered - tokens_per_id < asked <= covered and (self.hash_ids or asked):
            raise TraceError(
                f"{where}: input_length {asked} does not fit {len(self.hash_ids)} hash_ids of "
                f"{tokens_per_id} tokens each"
            )
        prompt = ids.hashed(self.hash_ids, tokens_per_id, asked)
        return Turn(prompt, ids.fresh(int(self.output_length)), at=at)


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


def mooncake(path: Path, ids: TokenIds) -> Iterator[Session]:
    """{"timestamp": ms, "input_length", "output_length", "hash_ids"}; a line is a session.

    The format has no links between turns: prefixes are shared through equal ids.
    """
    for where, row in json_lines(path, _MooncakeRow):
        at = row.timestamp / 1000
        yield Session(at, (row.turn(where, MOONCAKE_TOKENS, at, ids),), whole=True)


def bailian(path: Path, ids: TokenIds) -> Iterator[Session]:
    """As Mooncake with 16 tokens an id and seconds; parent_chat_id links turns, -1 starts one.

    A session is a root and its descendants by time.
    """
    root_of: dict[int | str, int | str] = {}
    sessions: dict[int | str, list[tuple[str, _BailianRow]]] = {}
    for where, row in sorted(json_lines(path, _BailianRow), key=lambda item: item[1].timestamp):
        chat, parent = row.chat_id, row.parent_chat_id
        root = chat if parent in (-1, "-1") else root_of.get(parent, parent)
        root_of[chat] = root
        sessions.setdefault(root, []).append((where, row))
    for rows in sessions.values():
        turns = tuple(row.turn(at, BAILIAN_TOKENS, row.timestamp, ids) for at, row in rows)
        yield Session(rows[0][1].timestamp, turns, whole=True)


def burstgpt(path: Path, ids: TokenIds) -> Iterator[Session]:
    """Timestamp, [Session ID,] Request tokens, Response tokens; rows of one session are its turns.
    A prompt that covers the session so far contains it; any other is new in whole.

    Rows without request tokens are failures and left out. Sessions need the Session ID column of
    version 1.2 and later; without it each row is a session.
    """
    sessions: dict[str, list[_BurstRow]] = {}
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
                sessions.setdefault(row.session or f"row {line}", []).append(row)
    for rows in sessions.values():
        rows.sort(key=lambda row: row.at)
        turns: list[Turn] = []
        so_far = 0
        for row in rows:
            asked, answered = int(row.asked), int(row.answered)
            said = ids.fresh(asked - so_far if asked > so_far else asked)
            turns.append(Turn((said,), ids.fresh(answered), at=row.at))
            so_far += said.length + answered
        yield Session(rows[0].at, tuple(turns))


def sharegpt(path: Path, ids: TokenIds) -> Iterator[Session]:
    """[{"conversations": [{"from": "human"|"gpt", "value": str}, ...]}].

    What comes before an answer was asked with it; what is never answered is left out.
    """
    text = path.read_text(encoding="utf-8-sig")
    for talk in json_value(text, list[_Conversation], str(path)):
        turns: list[Turn] = []
        asked: list[str] = []
        for part in talk.conversations:
            if part.who in ("human", "user", "system"):
                asked.append(part.value)
            elif asked:
                turns.append(Turn(tuple(map(ids.of_text, asked)), ids.of_text(part.value)))
                asked = []
        yield Session(0.0, tuple(turns))


def _of_text(reader: Reader) -> Reader:
    """A reader that also refuses, with TraceError, a file that is no text or no table."""

    def read(path: Path, ids: TokenIds) -> Iterator[Session]:
        try:
            yield from reader(path, ids)
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
