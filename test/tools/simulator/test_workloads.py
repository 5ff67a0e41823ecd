"""Generated loads: the statistics that the papers state, and nothing shared by accident."""

from itertools import pairwise

import pytest

from sglang_hc.tools.simulator.workloads import attentionstore, l_eval, sharegpt4, shuffled
from sglang_hc.tools.workloads.l_eval import TASKS
from sglang_hc.tools.workloads.sessions import Workload


def lengths(workload: Workload) -> list[int]:
    """Tokens of each conversation, in ascending order."""
    return sorted(
        sum(turn.new_tokens + turn.answer.length for turn in session.turns)
        for session in workload.sessions
    )


def test_attentionstore_has_the_stated_statistics():
    workload = attentionstore(seed=3)
    count, tokens = len(workload.sessions), lengths(workload)
    assert count == 9000
    assert workload.num_turns / count == pytest.approx(5.75, abs=0.15)
    several = sum(len(session.turns) > 1 for session in workload.sessions)
    assert several / count == pytest.approx(0.73, abs=0.015)
    assert sum(n > 2048 for n in tokens) / count == pytest.approx(0.47, abs=0.015)
    assert sum(n > 4096 for n in tokens) / count == pytest.approx(0.30, abs=0.015)
    assert workload.warmup_turns == 10_000


def test_sharegpt4_has_the_stated_statistics():
    workload = sharegpt4(seed=1, sessions=4000)
    turns = [turn for session in workload.sessions for turn in session.turns]
    assert sum(turn.new_tokens for turn in turns) / len(turns) == pytest.approx(66.8, rel=0.05)
    assert sum(turn.answer.length for turn in turns) / len(turns) == pytest.approx(358.8, rel=0.05)
    median = lengths(workload)[2000]
    assert median == pytest.approx(2500, rel=0.05), "half of the histories are over 2.5K"


def test_sharegpt4_users_think_between_rounds():
    for session in sharegpt4(sessions=20).sessions:
        assert [turn.think for turn in session.turns] == [0.0] + [30.0] * (len(session.turns) - 1)


def test_l_eval_reuses_contexts_more_the_more_skewed():
    def distinct(alpha: float) -> int:
        sessions = l_eval(sessions=1000, alpha=alpha).sessions
        return len({s.turns[0].said[0].start for s in sessions})

    assert distinct(0.0) > distinct(1.0) > distinct(2.0)
    lengths = [s.turns[0].said[0].length for s in l_eval(sessions=3000, alpha=0.0).sessions]
    mean = sum(task.context for task in TASKS.values()) / len(TASKS)
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.08)


def test_shuffled_turns_keep_their_session_in_order_and_the_rate():
    workload = shuffled(attentionstore(sessions=500), rate=2.0, seed=1)
    times = sorted(t.at for s in workload.sessions for t in s.turns if t.at is not None)
    assert len(times) == workload.num_turns
    assert workload.num_turns / times[-1] == pytest.approx(2.0, rel=0.1)
    for session in workload.sessions:
        own = [turn.at for turn in session.turns]
        assert own == sorted(own) and session.arrival == own[0]


def test_no_two_turns_of_a_generated_conversation_share_tokens():
    spans = sorted(
        (span.start, span.length)
        for session in attentionstore(sessions=50).sessions
        for turn in session.turns
        for span in (*turn.said, turn.answer)
    )
    for (start, length), (following, _) in pairwise(spans):
        assert start + length <= following


@pytest.mark.parametrize("make", [attentionstore, sharegpt4, l_eval])
def test_a_seed_fixes_everything(make):
    assert make(seed=5, sessions=30) == make(seed=5, sessions=30)
    assert make(seed=5, sessions=30) != make(seed=6, sessions=30)
