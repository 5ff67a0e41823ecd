"""The cut of a conversation that outgrows its window."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.overflow import CannotCut, OverflowRule

rules = st.builds(
    OverflowRule,
    window=st.integers(512, 40_000),
    keep_first=st.integers(0, 300),
    drop=st.floats(0.05, 0.95),
    reserve=st.integers(1, 200),
)


@given(rules, st.integers(1, 200_000), st.integers(0, 400))
def test_what_is_kept_fits_and_has_its_head(rule: OverflowRule, length: int, answer: int) -> None:
    try:
        cut = rule.cut(length, answer)
    except CannotCut:
        # It is refused only when a whole step would leave less than a block behind the head.
        step = rule.drop * (rule.window - rule.reserve - rule.keep_first)
        room = max(rule.reserve, answer)
        head = max(BLOCK_TOKENS, rule.keep_first) + BLOCK_TOKENS
        assert step < 2 * BLOCK_TOKENS or rule.window - room - step < head + BLOCK_TOKENS
        return
    kept = length - cut.dropped
    assert kept + max(rule.reserve, answer) <= rule.window
    assert cut.head % BLOCK_TOKENS == 0 == cut.dropped % BLOCK_TOKENS
    assert cut.head >= max(BLOCK_TOKENS, rule.keep_first)
    assert cut.dropped == 0 or kept >= cut.head + BLOCK_TOKENS
    assert (cut.dropped > 0) == (length + max(rule.reserve, answer) > rule.window)


@given(rules, st.lists(st.integers(1, 700), min_size=2, max_size=60))
def test_the_same_cut_serves_many_turns(rule: OverflowRule, turns: list[int]) -> None:
    """Cuts only grow, by whole steps, and each lasts for a step's worth of new tokens."""
    length, cuts = 0, []
    for tokens in turns:
        length += tokens
        try:
            cuts.append((length, rule.cut(length, None).dropped))
        except CannotCut:
            return
    steps = sorted({dropped for _, dropped in cuts if dropped})
    for (_, before), (_, after) in pairwise(cuts):
        assert after >= before
    if steps:
        step = rule.cut(rule.window - rule.reserve + 1, None).dropped
        assert all(dropped % step == 0 for dropped in steps)
        for dropped in steps:
            lasted = [n for n, d in cuts if d == dropped]
            assert lasted[-1] - lasted[0] < step


@given(
    st.builds(
        OverflowRule,
        window=st.integers(64, 3000),
        keep_first=st.integers(0, 600),
        drop=st.floats(0.05, 0.95),
        reserve=st.integers(1, 2000),
    )
)
def test_a_rule_that_cannot_cut_is_known_before_a_prompt_comes(rule: OverflowRule) -> None:
    longer = max(1, rule.window - rule.reserve + 1)
    if rule.can_cut:
        assert rule.cut(longer, None).dropped
    else:
        with pytest.raises(CannotCut):
            rule.cut(longer, None)


def test_both_sides_of_the_window() -> None:
    rule = OverflowRule(window=2048, keep_first=64, drop=0.5, reserve=1024)
    assert rule.cut(1024, None).dropped == 0
    assert rule.cut(1025, None).dropped == 448  # half of 2048 - 1024 - 64, in whole blocks
    assert rule.cut(1024 + 448, None).dropped == 448
    assert rule.cut(1024 + 449, None).dropped == 2 * 448
    assert rule.cut(1025, 1025).dropped == 448, "an answer above the reserve takes its own room"
    with pytest.raises(CannotCut, match="ask for fewer new tokens"):
        rule.cut(1500, 1990)
    assert rule.cut(1025, None, keep_first=100).head == 128
