"""Agents that call tools: what the page says of the load."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import median

import pytest

from sglang_hc.tools.workloads.agents import LOMAX_SECONDS, LONGEST_S, TOOLS, USER, agents


def test_many_turns_long_inputs_short_answers():
    load = agents(seed=1, sessions=1000)
    assert 30 <= median(len(session.turns) for session in load.sessions) <= 45
    prompts = [sum(t.new_tokens + t.answer.length for t in s.turns) for s in load.sessions]
    answers = [turn.answer.length for session in load.sessions for turn in session.turns]
    assert median(prompts) > 100 * median(answers)


def test_a_pause_is_as_long_as_the_tool_that_was_called_takes():
    pauses: dict[str, list[float]] = defaultdict(list)
    for session in agents(seed=2, sessions=1000).sessions:
        for before, turn in pairwise(session.turns):
            pauses[before.calls].append(turn.think)
    assert pauses.keys() == TOOLS.keys()
    for name, tool in TOOLS.items():
        if name != USER:  # whose longest pauses are cut
            assert median(pauses[name]) == pytest.approx(tool.seconds, rel=0.15)
    assert max(max(found) for found in pauses.values()) <= LONGEST_S


def test_the_control_has_the_same_calls_and_pauses_that_do_not_hang_on_them():
    load = agents(seed=2, sessions=2000, pattern=False)
    pauses: dict[str, list[float]] = defaultdict(list)
    last: dict[str, int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    for session in load.sessions:
        last[session.turns[-1].calls] += 1
        for before, turn in pairwise(session.turns):
            pauses[before.calls].append(turn.think)
            calls[before.calls] += 1
    for name in ("read_file", "fetch_page", "query"):
        assert median(pauses[name]) == pytest.approx(LOMAX_SECONDS, rel=0.1)
    assert last[USER] / calls[USER] < 0.05, "whom nobody called ends no more often than others"


def test_the_same_seed_gives_the_same_load():
    assert agents(seed=5, sessions=5) == agents(seed=5, sessions=5) != agents(seed=6, sessions=5)
