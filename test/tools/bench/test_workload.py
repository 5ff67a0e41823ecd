"""Distributions, traces and their invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.harness.workload import (
    ChatSpec,
    Distribution,
    Session,
    Trace,
    Turn,
    Vocabulary,
    arrivals,
    clipped,
    synthetic_chat,
    with_arrivals,
    with_think,
    zipf_weights,
)
from sglang_hc.tools.cli.main import UsageError


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


@given(seed=st.integers(0, 2**32))
def test_equal_seeds_give_equal_traces(seed: int) -> None:
    vocabulary = Vocabulary(500, frozenset({3, 4}))
    first = synthetic_chat(spec(), vocabulary, [seed])
    assert first == synthetic_chat(spec(), vocabulary, [seed])
    assert first != synthetic_chat(spec(), vocabulary, [seed, 1])
    for session in first.sessions:
        assert len(session.system_ids) == 7
        assert session.turns[0].think_s == 0
        for turn in session.turns:
            assert turn.ids and turn.output_len >= 1
            assert all(0 <= token < 500 and token not in (3, 4) for token in turn.ids)


def test_system_prompts_are_shared_on_request_only() -> None:
    vocabulary = Vocabulary(500)
    own = synthetic_chat(spec(), vocabulary, [0])
    shared = synthetic_chat(spec(system_shared=True), vocabulary, [0])
    assert len({session.system_ids for session in own.sessions}) == 5
    assert len({session.system_ids for session in shared.sessions}) == 1


def test_poisson_arrivals_have_their_rate_and_scale_with_it() -> None:
    slow = arrivals("poisson", 3000, 2.0, np.random.default_rng(1))
    fast = arrivals("poisson", 3000, 4.0, np.random.default_rng(1))
    assert slow[0] == 0 and slow == sorted(slow)
    assert slow[-1] == pytest.approx(1500, rel=0.1)
    assert np.allclose(np.array(slow), 2 * np.array(fast))
    assert arrivals("uniform", 3, 2.0, np.random.default_rng(1)) == [0.0, 0.5, 1.0]
    assert arrivals("poisson", 3, float("inf"), np.random.default_rng(1)) == [0.0] * 3


def test_arrivals_and_think_change_times_only() -> None:
    trace = synthetic_chat(spec(), Vocabulary(500), [0])
    think = Distribution.parse("3", "--think")
    timed = with_think(with_arrivals(trace, "poisson", 1.0, [5]), think, [6])
    for before, after in zip(trace.sessions, timed.sessions, strict=True):
        assert [turn.ids for turn in before.turns] == [turn.ids for turn in after.turns]
        assert [turn.think_s for turn in after.turns] == [0.0] + [3.0] * (len(after.turns) - 1)


def test_a_prompt_is_the_whole_conversation() -> None:
    turns = (Turn((1, 2), 2), Turn((3,), 1), Turn((9, 9), 1, whole=True), Turn((4,), 1))
    trace = Trace("test", (Session("s", turns, system_ids=(0,)),))
    outputs = [[5, 6], [7], [8]]
    assert trace.prompt_ids(0, 0, []) == [0, 1, 2]
    assert trace.prompt_ids(0, 1, outputs[:1]) == [0, 1, 2, 5, 6, 3]
    assert trace.prompt_ids(0, 2, outputs[:2]) == [9, 9]
    assert trace.prompt_ids(0, 3, outputs) == [9, 9, 8, 4]
    assert trace.longest_prompt == 6


def test_clipping_drops_what_is_too_long_and_what_follows_and_says_so() -> None:
    long = Session("long", (Turn((1,) * 10, 2), Turn((1,) * 10, 2), Turn((1,), 1)))
    short = Session("short", (Turn((1,), 1),))
    cut = clipped(Trace("test", (long, short)), 20)
    assert [len(session.turns) for session in cut.sessions] == [1, 1]
    assert cut.notes == ("2 of 4 requests dropped: longer than 20 tokens",)
    with pytest.raises(UsageError, match="--max-len 1"):
        clipped(Trace("test", (long,)), 1)
