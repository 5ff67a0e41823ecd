"""Readers of public trace formats, on files written here in those formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.tokens import Tokenizer
from benchmark.harness.traces import TraceReader, parse_dataset
from benchmark.harness.workload import Trace, Vocabulary
from sglang_hc.tools.cli.main import UsageError


class WordTokenizer:
    """One id for every word."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, ids: Any) -> str:
        return " ".join("x" * value for value in ids)


def read(path: Path, kind: str, limit: int = 100) -> Trace:
    tokenizer: Tokenizer = WordTokenizer()
    return TraceReader(path, Vocabulary(1000), lambda: tokenizer, 1, limit).read(kind)


def write(path: Path, *rows: Any, lines: bool = False) -> Path:
    text = "\n".join(json.dumps(row) for row in rows) if lines else json.dumps(rows[0])
    path.write_text(text)
    return path


def test_sharegpt(tmp_path: Path) -> None:
    talk = [
        {"from": "human", "value": "a bb"},
        {"from": "gpt", "value": "c c c"},
        {"from": "human", "value": "dddd"},
        {"from": "gpt", "value": "e"},
        {"from": "human", "value": "never answered"},
    ]
    lone = {"id": "y", "conversations": [{"from": "gpt", "value": "no question"}]}
    path = write(tmp_path / "s.json", [{"id": "x", "conversations": talk}, lone])
    (session,) = read(path, "sharegpt").sessions
    assert session.name == "x"
    assert [turn.ids for turn in session.turns] == [(1, 2), (4,)]
    assert [turn.output_len for turn in session.turns] == [3, 1]
    assert session.turns[0].text == "a bb"


def test_vllm_conversations(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi you"},
        {"role": "assistant", "content": "hello"},
    ]
    (session,) = read(
        write(tmp_path / "v.json", [{"id": "1", "messages": messages}]), "vllm"
    ).sessions
    assert session.system_ids == (2, 4)
    assert session.turns[0].ids == (2, 3)


def test_vllm_generator(tmp_path: Path) -> None:
    value = {
        "filetype": "generate_conversations",
        "prompt_input": {
            "num_turns": {"distribution": "constant", "value": 6},
            "prefix_num_tokens": {"distribution": "constant", "value": 5},
            "num_tokens": {"distribution": "uniform", "min": 10, "max": 20},
        },
        "prompt_output": {"num_tokens": {"distribution": "lognormal", "average": 30, "max": 60}},
    }
    trace = read(write(tmp_path / "g.json", value), "vllm", limit=4)
    assert len(trace.sessions) == 4
    for session in trace.sessions:
        assert len(session.turns) == 3
        assert len(session.system_ids) == 5
        assert all(10 <= len(turn.ids) <= 20 and turn.output_len <= 60 for turn in session.turns)


def test_mooncake_shares_prefixes_through_hash_ids(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 5000, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]},
        {"timestamp": 7000, "input_length": 900, "output_length": 3, "hash_ids": [1, 3]},
    ]
    trace = read(write(tmp_path / "m.jsonl", *rows, lines=True), "mooncake")
    first, second = (session.turns[0] for session in trace.sessions)
    assert [session.arrival_s for session in trace.sessions] == [0.0, 2.0]
    assert (len(first.ids), len(second.ids)) == (700, 900)
    assert first.ids[:512] == second.ids[:512]
    assert first.ids[512:] != second.ids[512:700]
    assert first.whole and trace.timed


def test_bailian_follows_the_links_between_turns(tmp_path: Path) -> None:
    def row(chat: int, parent: int, at: float, hashes: list[int]) -> dict[str, Any]:
        return {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": at,
            "input_length": 16 * len(hashes),
            "output_length": 4,
            "type": "text",
            "turn": 1,
            "hash_ids": hashes,
        }

    rows = [
        row(1, -1, 10, [1]),
        row(2, -1, 11, [5]),
        row(3, 1, 12, [1, 2]),
        row(4, 3, 13, [1, 2, 3]),
    ]
    trace = read(write(tmp_path / "b.jsonl", *rows, lines=True), "bailian")
    assert [len(session.turns) for session in trace.sessions] == [3, 1]
    assert [turn.at_s for turn in trace.sessions[0].turns] == [0.0, 2.0, 3.0]
    assert trace.sessions[0].turns[2].ids[:32] == trace.sessions[0].turns[1].ids
    assert len(read(tmp_path / "b.jsonl", "bailian", limit=1).sessions) == 1


def test_burstgpt_sessions(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n"
        "100,7,1,m,50,20,70,Conversation log\n"
        "130,7,1,m,90,10,100,Conversation log\n"
        "140,7,1,m,30,10,40,Conversation log\n"
        "110,8,1,m,40,0,40,API log\n"
    )
    (session,) = read(path, "burstgpt").sessions
    # 90 covers the 70 tokens so far: 20 are new. 30 does not cover 100: all of it is new.
    assert [len(turn.ids) for turn in session.turns] == [50, 20, 30]
    assert [turn.at_s for turn in session.turns] == [0.0, 30.0, 40.0]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("sharegpt", "{", "not JSON"),
        ("sharegpt", "{}", "Expected `array`, got `object`"),
        ("sharegpt", '[{"id": 1}]', "conversations"),
        ("sharegpt", "[]", "no usable conversation"),
        ("vllm", '{"filetype": "other"}', "filetype"),
        ("vllm", '{"filetype": "generate_conversations"}', "prompt_input"),
        ("mooncake", "no json", ":1: not JSON"),
        ("mooncake", '{"timestamp": 1}', "missing required field"),
        (
            "mooncake",
            '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "does not fit 1 hash_ids",
        ),
        ("bailian", '{"timestamp": 1}', "missing required field"),
        ("burstgpt", "a,b\n1,2\n", "no column"),
        (
            "burstgpt",
            "Timestamp,Request tokens,Response tokens\nx,1,2\n",
            ":2: Expected `float`, got `str` - at .*Timestamp",
        ),
    ],
)
def test_a_damaged_file_is_one_clear_error(
    tmp_path: Path, kind: str, text: str, words: str
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        read(path, kind)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "absent", "mooncake")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        read(tmp_path / "binary", "sharegpt")


@pytest.mark.parametrize("text", ["sharegpt", "sharegpt:", "other:x"])
def test_dataset_words(text: str) -> None:
    with pytest.raises(UsageError, match="FORMAT:PATH"):
        parse_dataset(text)
    assert parse_dataset("bailian:a:b")[1] == Path("a:b")
