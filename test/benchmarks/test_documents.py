"""Conversations about documents: the ids that are sent are those of the model's chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness import documents
from benchmark.harness.tokens import Tokenizer, load_tokenizer
from benchmark.harness.workload import prompt_ids
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.workloads.sessions import Session

TALK = {
    "document": "text.txt",
    "lines": [2, 3],
    "questions": ["What is it?", "And then?", "Why?"],
    "reply_tokens": 4,
}


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_tokenizer))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("title\nfirst line of it\nsecond line\nafter\n")
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([TALK, TALK]))
    return path


def read(path: Path, tokenizer: Tokenizer, limit: int = 9) -> tuple[Session, ...]:
    return documents.read(path, tokenizer, limit)


def test_the_ids_are_those_of_the_whole_chat(file: Path, tokenizer: Tokenizer) -> None:
    session, _ = read(file, tokenizer)
    assert tokenizer.end is not None and session.end_id == tokenizer.end[0]
    replies = [" the water was long", " great house"]
    outputs = [tokenizer.encode(replies[0]), [*tokenizer.encode(replies[1]), tokenizer.end[0]]]
    user = ["first line of it\nsecond line\n\nWhat is it?", "And then?", "Why?"]
    for turn in range(3):
        chat = [{"role": "user", "content": user[0]}]
        for before in range(turn):
            chat.append({"role": "assistant", "content": replies[before]})
            chat.append({"role": "user", "content": user[before + 1]})
        # The first reply was cut, the second ended by itself: the history is the same chat.
        assert prompt_ids(session, turn, outputs[:turn]) == tokenizer.encode(tokenizer.chat(chat))
    assert [turn.label for turn in session.turns] == TALK["questions"]
    assert [turn.answer.length for turn in session.turns] == [4, 4, 4]


def test_the_limit_counts_conversations(file: Path, tokenizer: Tokenizer) -> None:
    assert len(read(file, tokenizer, 1)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lines": [0, 2]}, "has lines 1 to 4, not 0 to 2"),
        ({"lines": [3, 5]}, "has lines 1 to 4, not 3 to 5"),
        ({"lines": [3, 2]}, "not 3 to 2"),
        ({"questions": []}, "conversation 0 needs a question"),
        ({"reply_tokens": 0}, "reply_tokens"),
        ({"lines": "all"}, "lines"),
        ({"question": "x"}, "unknown field"),
    ],
)
def test_a_mistake_in_the_file_is_one_message(
    file: Path, tokenizer: Tokenizer, change: dict[str, Any], message: str
) -> None:
    file.write_text(json.dumps([{**TALK, **change}]))
    with pytest.raises(UsageError, match=message):
        read(file, tokenizer)


def test_first_and_last_line_may_be_asked_for(file: Path, tokenizer: Tokenizer) -> None:
    file.write_text(json.dumps([{**TALK, "lines": [1, 4]}]))
    text = documents.messages(documents.load(file)[0], file.parent)[0]
    assert text.startswith("title\n") and "\nafter\n\nWhat is it?" in text


def test_a_template_that_does_not_end_replies_is_refused(
    file: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat(_: object, messages: list[dict[str, str]]) -> str:
        return "".join(f"[{m['role']}] {m['content']}\n" for m in messages)

    monkeypatch.setattr(type(tokenizer), "chat", chat)
    with pytest.raises(UsageError, match="does not end replies"):
        read(file, tokenizer)
