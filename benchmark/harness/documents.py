"""Conversations about documents, in the model's own chat format, with replies that end freely.

A file is a JSON list of conversations:

    [{"document": "constitution.txt", "lines": [302, 397], "questions": ["...", "..."],
      "reply_tokens": 40}, ...]

The document lies beside the file; `lines` are the first and the last line of it that the user
pastes into the first question. A reply has at most `reply_tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmark.harness.tokens import Tokenizer
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.workloads.sessions import Ids, Session, Span, Turn
from sglang_hc.tree.identity import pack_tokens

_REPLY = "\x00reply\x00"
"""Stands for the replies while the template is rendered: no document holds it."""


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file."""

    document: str
    lines: tuple[int, int]
    questions: tuple[str, ...]
    reply_tokens: int


def load(path: Path) -> list[Conversation]:
    """Raises UsageError that names the file, the place and what was expected there; OSError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Conversation])
    except msgspec.DecodeError as error:
        raise UsageError(f"--dataset documents:{path}: {error}") from None
    for number, talk in enumerate(found):
        if not talk.questions or talk.reply_tokens < 1:
            raise UsageError(
                f"--dataset documents:{path}: conversation {number} needs a question and "
                '"reply_tokens" of at least 1'
            )
    return found


def messages(talk: Conversation, folder: Path) -> list[str]:
    """What the user says in every turn. Raises UsageError for lines that are not there; OSError."""
    lines = (folder / talk.document).read_text(encoding="utf-8").splitlines()
    first, last = talk.lines
    if not 1 <= first <= last <= len(lines):
        raise UsageError(
            f"--dataset documents: {talk.document} has lines 1 to {len(lines)}, not {first} to "
            f'{last}; correct "lines"'
        )
    text = "\n".join(lines[first - 1 : last]).strip()
    return [f"{text}\n\n{talk.questions[0]}", *talk.questions[1:]]


def read(path: Path, tokenizer: Tokenizer, limit: int) -> tuple[Session, ...]:
    """The first `limit` conversations of the file. Raises UsageError, OSError."""
    sessions = []
    for talk in load(path)[:limit]:
        end_id, parts = rendered(messages(talk, path.parent), tokenizer)
        answer = Span(0, talk.reply_tokens)
        turns = tuple(
            Turn((Ids(pack_tokens(tokenizer.encode(part))),), answer, label=question)
            for part, question in zip(parts, talk.questions, strict=True)
        )
        sessions.append(Session(0.0, turns, end_id=end_id))
    return tuple(sessions)


def rendered(asked: Sequence[str], tokenizer: Tokenizer) -> tuple[int, list[str]]:
    """(id that ends a reply, the text between replies for every turn) by the chat template.

    Raises UsageError when the model has no template, or one that does not end replies with its
    end token: a history could not be put together from ids then.
    """
    chat = [
        {"role": role, "content": content}
        for text in asked
        for role, content in (("user", text), ("assistant", _REPLY))
    ][:-1]
    end = tokenizer.end
    try:
        parts = tokenizer.chat(chat).split(_REPLY)
    except ValueError as error:
        raise UsageError(f"--dataset documents: {str(error).splitlines()[0]}") from None
    if end is None or not all(part.startswith(end[1]) for part in parts[1:]):
        raise UsageError(
            "--dataset documents: the chat template of this model does not end replies with its "
            "end token; give another --model"
        )
    return end[0], [parts[0], *(part.removeprefix(end[1]) for part in parts[1:])]
