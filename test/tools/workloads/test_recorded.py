"""A server's record as a load: prompts share what they shared, answers follow their prompts."""

from __future__ import annotations

from itertools import combinations, count
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_hc.queue.requests import Serial
from sglang_hc.tiers.trace import Recorder
from sglang_hc.tools.workloads.reading import Timing, read_trace
from sglang_hc.tools.workloads.sessions import Turn
from sglang_hc.tree.block_tree import common_tokens
from sglang_hc.tree.identity import TOKEN_BYTES, Prefix, pack_tokens

sequences = st.lists(st.integers(0, 1), min_size=1, max_size=150)
talks = st.lists(
    st.tuples(
        st.sampled_from([None, "tenant"]), sequences, st.lists(st.integers(0, 1), max_size=9)
    ),
    min_size=2,
    max_size=6,
)


def prompt_of(turn: Turn) -> bytes:
    return b"".join(part.packed for part in turn.said)


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(many=talks)
def test_prompts_share_what_they_shared(tmp_path: Path, many: list) -> None:
    path = tmp_path / "t.jsonl"
    path.unlink(missing_ok=True)
    recorder = Recorder(path, {}, b"f" * 16)
    for number, (namespace, prompt, answer) in enumerate(many):
        recorder.arrived(Serial(number), Prefix(namespace, pack_tokens(prompt)))
        recorder.finished(Serial(number), Prefix(namespace, pack_tokens(prompt + answer)))
    recorder.close()
    turns = [session.turns[0] for session in read_trace(path, Timing()).sessions]
    assert len(turns) == len(many)
    for turn, (_, prompt, answer) in zip(turns, many, strict=True):
        assert turn.new_tokens == len(prompt) and turn.answer.length == len(answer)
    for (a, one), (b, two) in combinations(zip(many, turns, strict=True), 2):
        shared = common_tokens(pack_tokens(a[1]), pack_tokens(b[1])) if a[0] == b[0] else 0
        assert common_tokens(prompt_of(one), prompt_of(two)) == shared


def test_a_second_turn_continues_the_first_answer(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, {}, b"f" * 16)
    first, answer = list(range(100)), list(range(500, 560))
    recorder.arrived(Serial(0), Prefix(None, pack_tokens(first)))
    recorder.finished(Serial(0), Prefix(None, pack_tokens(first + answer)))
    recorder.arrived(Serial(1), Prefix(None, pack_tokens([*first, *answer, 7, 8])))
    recorder.arrived(Serial(2), Prefix(None, pack_tokens([1])))
    recorder.gone(Serial(2))
    recorder.finished(Serial(1), Prefix(None, pack_tokens([*first, *answer, 7, 8, 9])))
    recorder.close()
    with path.open("a") as file:
        file.write('{"op":"arr')  # the server was ended while it wrote
    turns = {s.turns[0].new_tokens: s.turns[0] for s in read_trace(path, Timing()).sessions}
    one, two, aborted = turns[100], turns[162], turns[1]
    said = prompt_of(one) + one.answer.packed
    assert len(said) == 160 * TOKEN_BYTES and prompt_of(two).startswith(said)
    assert aborted.answer.length == 0


def test_in_a_closed_loop_a_turn_waits_for_the_answer_before(tmp_path: Path) -> None:
    """Turns are found by what they begin with; one that shares only a system prompt is nobody's
    later turn, and of two that go on from one answer the second is a conversation of its own."""
    now = count(0.0, 10.0)
    recorder = Recorder(tmp_path / "t.jsonl", {}, b"f" * 16, clock=lambda: next(now))
    first, answer = list(range(100)), list(range(500, 560))
    later = [*first, *answer, 7, 8]

    def arrives(number: int, prompt: list[int]) -> None:
        recorder.arrived(Serial(number), Prefix(None, pack_tokens(prompt)))

    def ends(number: int, tokens: list[int]) -> None:
        recorder.finished(Serial(number), Prefix(None, pack_tokens(tokens)))

    arrives(0, first)
    ends(0, first + answer)
    arrives(1, later)
    arrives(2, [*first, *answer, 9])
    arrives(3, [*first[:90], 1, 2])
    for number, tokens in ((1, [*later, 5]), (2, [*first, *answer, 9, 9]), (3, first[:90])):
        ends(number, tokens)
    recorder.close()
    open_loop = read_trace(tmp_path / "t.jsonl", Timing())
    assert [len(session.turns) for session in open_loop.sessions] == [1, 1, 1, 1]
    closed = read_trace(tmp_path / "t.jsonl", Timing(), closed_loop=True)
    talk, *others = closed.sessions
    assert [len(session.turns) for session in closed.sessions] == [2, 1, 1]
    opened, resumed = talk.turns
    assert talk.whole and opened.at is not None and resumed.at is None
    record = {s.turns[0].new_tokens: s.arrival for s in open_loop.sessions}
    assert 0 < resumed.think < record[162] - record[100]
    assert {session.turns[0].new_tokens for session in others} == {161, 92}


def test_tools_are_named_by_numbers(tmp_path: Path) -> None:
    """What clients call them is nobody else's business."""
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, {}, b"f" * 16)
    for number, tool in enumerate(["secret_tool", "", "other", "secret_tool"]):
        recorder.arrived(Serial(number), Prefix(None, pack_tokens([number])))
        recorder.finished(Serial(number), Prefix(None, pack_tokens([number, 5])), tool)
    recorder.close()
    assert "secret" not in path.read_text()
    turns = [session.turns[0] for session in read_trace(path, Timing()).sessions]
    assert [turn.calls for turn in turns] == ["tool 0", "", "tool 1", "tool 0"]
