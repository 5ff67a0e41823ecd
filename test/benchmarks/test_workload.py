"""Distributions, traces and their invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.harness.workload import (
    ChatSpec,
    Distribution,
    History,
    Vocabulary,
    arrivals,
    clipped,
    longest_prompt,
    prompt_ids,
    synthetic_chat,
    unpacked,
    with_arrivals,
    with_think,
    zipf_weights,
)
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.workloads.sessions import Ids, Session, Span, Turn, Workload
from sglang_hc.tree.identity import pack_tokens


def spec(**changes: object) -> ChatSpec:
    values: dict[str, object] = {
        "sessions": 5,
        "turns": Distribution.parse("uniform:1:4", "--turns"),
        "input_len": Distribution.parse("lognormal:40:0.5:200", "--input-len"),
        "output_len": Distribution.parse("exponential:10:30", "--output-len"),
        "think": Distribution.parse("exponential:2", "--think"),
        "system_len": 7,
    }
    return ChatSpec(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("12", 12.0),
        ("constant:3.5", 3.5),
        ("uniform:10:30", 20.0),
        ("exponential:8", 8.0),
        ("poisson:9", 9.0),
        ("lognormal:100:0.7", 100.0),
    ],
)
def test_a_distribution_has_its_mean(text: str, mean: float) -> None:
    rng = np.random.default_rng(0)
    drawn = [Distribution.parse(text, "--x").draw(rng) for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.06)


def test_zipf_prefers_small_ranks_and_stays_in_range() -> None:
    rng = np.random.default_rng(0)
    drawn = [Distribution.parse("zipf:1.5:6", "--x").draw(rng) for _ in range(2000)]
    counts = [drawn.count(rank) for rank in range(1, 7)]
    assert sum(counts) == 2000
    assert counts == sorted(counts, reverse=True)
    assert zipf_weights(4, 0) == [0.25] * 4


def test_limits_are_kept() -> None:
    rng = np.random.default_rng(0)
    limited = Distribution.parse("lognormal:100:1:120", "--x")
    assert max(limited.draw(rng) for _ in range(500)) <= 120


@pytest.mark.parametrize(
    "text",
    [
        "",
        "abc",
        "uniform:5",
        "uniform:9:3",
        "constant:-1",
        "lognormal:0:1",
        "zipf:1:0",
        "poisson:x",
        "constant:nan",
        "exponential:inf",
    ],
)
def test_a_bad_distribution_names_its_option(text: str) -> None:
    with pytest.raises(UsageError, match="--input-len"):
        Distribution.parse(text, "--input-len")


def said(*ids: int) -> Ids:
    return Ids(pack_tokens(ids))


def ids_of(turn: Turn) -> list[int]:
    return [token for part in turn.said for token in unpacked(part).tolist()]


@given(seed=st.integers(0, 2**32))
def test_equal_seeds_give_equal_workloads(seed: int) -> None:
    vocabulary = Vocabulary(500, frozenset({3, 4}))
    made = synthetic_chat(spec(), [seed])
    first = vocabulary.spoken(made, [seed])
    assert first == vocabulary.spoken(synthetic_chat(spec(), [seed]), [seed])
    assert first != vocabulary.spoken(made, [seed, 1])
    for session in first.sessions:
        assert len(session.turns[0].said) == 2 and session.turns[0].said[0].length == 7
        assert session.turns[0].think == 0
        for turn in session.turns:
            ids = ids_of(turn)
            assert ids and turn.answer.length >= 1
            assert all(0 <= token < 500 and token not in (3, 4) for token in ids)


def test_equal_spans_get_equal_ids_and_ids_of_the_model_stay() -> None:
    own = said(9, 499, 1 << 30)
    turns = (Turn((Span(5, 40), Span(7, 3)), Span(0, 1)), Turn((own,), Span(0, 1)))
    spoken = Vocabulary(500).spoken(Workload("test", (Session(0.0, turns),)), [1])
    (long, part), (kept,) = (
        [unpacked(said).tolist() for said in turn.said] for turn in spoken.sessions[0].turns
    )
    assert part == long[2:5] and len(set(long)) > 30
    assert kept[:2] == [9, 499] and kept[2] < 500


def test_system_prompts_are_shared_on_request_only() -> None:
    own = synthetic_chat(spec(), [0])
    shared = synthetic_chat(spec(system_shared=True), [0])
    assert len({session.turns[0].said[0] for session in own.sessions}) == 5
    assert len({session.turns[0].said[0] for session in shared.sessions}) == 1


def test_poisson_arrivals_have_their_rate_and_scale_with_it() -> None:
    slow = arrivals("poisson", 3000, 2.0, np.random.default_rng(1))
    fast = arrivals("poisson", 3000, 4.0, np.random.default_rng(1))
    assert slow[0] == 0 and slow == sorted(slow)
    assert slow[-1] == pytest.approx(1500, rel=0.1)
    assert np.allclose(np.array(slow), 2 * np.array(fast))
    assert arrivals("uniform", 3, 2.0, np.random.default_rng(1)) == [0.0, 0.5, 1.0]
    assert arrivals("poisson", 3, float("inf"), np.random.default_rng(1)) == [0.0] * 3


def test_arrivals_and_think_change_times_only() -> None:
    workload = synthetic_chat(spec(), [0])
    think = Distribution.parse("3", "--think")
    timed = with_think(with_arrivals(workload, "poisson", 1.0, [5]), think, [6])
    for before, after in zip(workload.sessions, timed.sessions, strict=True):
        assert [turn.said for turn in before.turns] == [turn.said for turn in after.turns]
        assert [turn.think for turn in after.turns] == [0.0] + [3.0] * (len(after.turns) - 1)


def test_a_prompt_is_the_whole_conversation_or_what_the_turn_says() -> None:
    turns = (Turn((said(0), said(1, 2)), Span(0, 2)), Turn((said(3),), Span(0, 1)))
    talk, whole = Session(0.0, turns), Session(0.0, turns, whole=True)
    assert prompt_ids(talk, 0, []) == [0, 1, 2]
    assert prompt_ids(talk, 1, [[5, 6]]) == [0, 1, 2, 5, 6, 3]
    assert prompt_ids(whole, 1, [[5, 6]]) == [3]
    assert longest_prompt(Workload("test", (talk,))) == 6
    assert longest_prompt(Workload("test", (whole,))) == 3


@pytest.mark.parametrize("end_id", [None, 7])
def test_a_reply_that_was_cut_gets_its_end(end_id: int | None) -> None:
    history = History(Session(0.0, (), end_id=end_id))
    history.ask(Turn((said(1),), Span(0, 3)))
    history.answer([4, 5])
    history.answer([6, 7])
    assert history.ids == ([1, 4, 5, 6, 7] if end_id is None else [1, 4, 5, 7, 6, 7])
    assert history.free_end is (end_id is not None)


def test_clipping_drops_what_is_too_long_and_what_follows_and_says_so() -> None:
    ten, one = Turn((Span(0, 10),), Span(0, 2)), Turn((Span(0, 1),), Span(0, 1))
    long, short = Session(0.0, (ten, ten, one)), Session(0.0, (one,))
    cut = clipped(Workload("test", (long, short)), 20)
    assert [len(session.turns) for session in cut.sessions] == [1, 1]
    assert cut.notes == ("2 of 4 requests dropped: longer than 20 tokens",)
    with pytest.raises(UsageError, match="--max-len 1"):
        clipped(Workload("test", (long,)), 1)
