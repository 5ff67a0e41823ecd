"""Trace readers: every format, and one clear error for everything that is not one."""

import json
from pathlib import Path

import pytest

from sglang_hc.tools.workloads.reading import Timing, read_trace
from sglang_hc.tools.workloads.traces import TraceError
from sglang_hc.tree.identity import pack_tokens

SAMPLES = Path(__file__).parents[3] / "benchmark" / "simulator" / "samples"
MOONCAKE = {"timestamp": 2000, "input_length": 700, "output_length": 9, "hash_ids": [4, 7]}
BAILIAN = {
    "chat_id": 1,
    "parent_chat_id": -1,
    "timestamp": 5.0,
    "input_length": 20,
    "output_length": 3,
    "hash_ids": [8, 9],
}


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("mooncake.jsonl", 182),
        ("bailian.jsonl", 200),
        ("burstgpt.csv", 251),
        ("sharegpt.json", 150),
    ],
)
def test_the_shipped_samples_are_read(name, turns):
    workload = read_trace(SAMPLES / name, Timing())
    assert workload.num_turns == turns
    assert min(session.arrival for session in workload.sessions) == 0.0


def test_mooncake_ids_stand_for_512_shared_tokens(tmp_path):
    longer = {**MOONCAKE, "timestamp": 3000, "input_length": 1024 + 5, "hash_ids": [4, 7, 8]}
    first, second = read_trace(write(tmp_path, lines(MOONCAKE, longer)), Timing()).sessions
    assert [s.length for s in first.turns[0].said] == [512, 188]
    assert first.turns[0].said[0] == second.turns[0].said[0]
    assert second.arrival - first.arrival == 1.0 and first.whole


def test_bailian_turns_follow_their_parents(tmp_path):
    child = {**BAILIAN, "chat_id": 2, "parent_chat_id": 1, "timestamp": 9.0}
    other = {**BAILIAN, "chat_id": 3, "timestamp": 6.0}
    path = write(tmp_path, lines(child, BAILIAN, other))
    talk, single = read_trace(path, Timing()).sessions
    assert [turn.at for turn in talk.turns] == [0.0, 4.0]
    assert [turn.at for turn in single.turns] == [1.0]


def test_burstgpt_sessions_are_conversations(tmp_path):
    text = (
        "Timestamp,Session ID,Request tokens,Response tokens\n"
        "10,a,50,20\n12,b,7,8\n30,a,90,10\n40,,3,0\n41,b,0,0\n50,a,30,1\n"
    )
    sessions = read_trace(write(tmp_path, text), Timing()).sessions
    assert [len(s.turns) for s in sessions] == [3, 1, 1]
    # 90 covers the 70 tokens so far: 20 are new. 30 does not cover 100: all of it is new.
    assert [t.new_tokens for t in sessions[0].turns] == [50, 20, 30] and not sessions[0].whole
    assert len(read_trace(tmp_path / "trace", Timing(), limit=2).sessions) == 2


def test_sharegpt_lengths_are_estimated_and_arrivals_drawn(tmp_path):
    talk = [
        {"from": "system", "value": "x" * 8},
        {"from": "human", "value": "x" * 40},
        {"from": "gpt", "value": "x" * 100},
        {"from": "human", "value": "unanswered"},
    ]
    path = write(tmp_path, json.dumps([{"conversations": talk}] * 3))
    workload = read_trace(path, Timing(rate=2.0, think=7.0, seed=1))
    assert workload.num_turns == 3
    assert workload.sessions[0].turns[0].new_tokens == 12
    assert workload.sessions[0].turns[0].answer.length == 25
    assert workload == read_trace(path, Timing(rate=2.0, think=7.0, seed=1))
    words = read_trace(path, Timing(), lambda text: [7] * len(text.split()))
    assert words.sessions[0].turns[0].said[1].packed == pack_tokens([7])
    assert words.sessions[0].turns[0].answer.length == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a trace this tool knows"),
        ("hello\n", "not a trace this tool knows"),
        ('{"timestamp": 1\n', r":1: not JSON"),
        (lines(MOONCAKE) + "[1]\n", r":2: Expected `object`, got `array`"),
        (lines({**MOONCAKE, "hash_ids": "x"}), r"Expected `array`.*hash_ids"),
        (lines({**MOONCAKE, "hash_ids": [-1]}), r"`int` >= 0 - at `.*hash_ids"),
        (lines({**MOONCAKE, "input_length": 9000}), "does not fit 2 hash_ids"),
        (lines({**MOONCAKE, "timestamp": "soon"}), r"Expected `float`.*timestamp"),
        (lines({"timestamp": 1}), "missing required field"),
        (
            lines({**BAILIAN, "parent_chat_id": None}),
            r"`int \| str`, got `null` - at `.*parent_chat_id",
        ),
        ("Timestamp,Request tokens,Response tokens\n1,x,2\n", r":2: .*Request tokens"),
        ("Timestamp,Request tokens\n1,2\n", "no column Response tokens"),
        ("Timestamp,Request tokens,Response tokens\n1,-2,2\n", r">= 0.0 - at `.*Request tokens"),
        ("[1]", r"Expected `object`, got `int` - at `\$\[0\]`"),
        ('[{"conversations": [{"from": "human"}]}]', "missing required field `value`"),
        ("[", "not JSON"),
        ("[]", "holds no request"),
    ],
)
def test_what_is_wrong_is_said_once_and_with_its_place(tmp_path, text, says):
    with pytest.raises(TraceError, match=says):
        read_trace(write(tmp_path, text), Timing())


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "missing", Timing())
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(TraceError, match="not a UTF-8"):
        read_trace(path, Timing())
