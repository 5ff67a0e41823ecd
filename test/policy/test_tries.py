"""What is never done is tried now and then: seldom, bounded, and without chance."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.restore_plan import plan_restore
from sglang_hc.policy.tries import LAST_GAP, TRY_SHARE, Tries, affordable
from support.profiles import cost_model

PLAN = LayerPlan(0, 0, 4)


def tried(tries: Tries, refusals: int) -> list[int]:
    found = []
    for number in range(refusals):
        if tries.due:
            tries.tried()
            found.append(number)
        else:
            tries.refused()
    return found


def test_the_gaps_grow_up_to_a_bound() -> None:
    found = tried(Tries(), 200)
    assert found[:6] == [0, 2, 5, 10, 19, 36]
    gaps = [b - a - 1 for a, b in pairwise(found)]
    assert max(gaps) == gaps[-1] == LAST_GAP


def test_a_change_of_the_costs_begins_again() -> None:
    tries = Tries()
    tried(tries, 200)
    tries.follow(0)
    assert len(tried(tries, LAST_GAP)) <= 1
    tries.follow(1)
    assert len(tried(tries, 8)) == 3
    tries.follow(1)
    assert tried(tries, 3) == [], "the same change once"


def test_a_try_that_was_not_made_stays_due() -> None:
    tries = Tries()
    for _ in range(9):
        tries.refused()
    assert tries.due


seconds = st.floats(1e-9, 1e-3)


@given(seconds, seconds, seconds, st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 999))
def test_a_try_costs_no_more_than_its_share(host, project, prefill, tokens, context, new) -> None:
    cost = cost_model(host=host, project=project, prefill=prefill)
    plan = LayerPlan(1, 2, 1)
    best = plan_restore(cost, plan, tokens, context=context, new=new).seconds
    found = affordable(cost, plan, tokens, context=context, new=new, seconds=best)
    assert 0 <= found <= tokens
    if found:
        part = plan_restore(
            cost, plan, found, context=context, new=new + tokens - found, allow_recompute=False,
        )  # fmt: skip
        assert part.as_stored_seconds <= (1 + TRY_SHARE) * best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("host", "tokens"),
    [
        (1e-6, 1024),  # cheap: all of it
        (3e-4, 512),  # three times as dear as prefill: half of it
        (9e-4, 128),
        (1.6e-3, BLOCK_TOKENS),
        (2e-2, 0),  # one block alone takes more than everything
    ],
)
def test_the_dearer_the_less_is_tried(host: float, tokens: int) -> None:
    cost = cost_model(host=host, prefill=1e-4, overlap=False)
    refused = 4 * cost.prefill_layer(1024 + 1, 0)
    assert affordable(cost, PLAN, 1024, context=0, new=1, seconds=refused) == tokens
