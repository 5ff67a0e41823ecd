"""A server on a simulated machine: a right profile is believed, a wrong one is unlearned."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.correction import BOUND, DEAD_BAND, Resource
from sglang_hc.policy.cost_model import CostModel
from sglang_hc.policy.restore_plan import Decision, plan_restore
from sglang_hc.policy.tries import LAST_GAP, TRY_SHARE, affordable
from support.examples import examples
from support.profiles import cost_model
from support.simulated_machine import SimulatedMachine, is_try, scaled

PLANS = [LayerPlan(0, 0, 8), LayerPlan(0, 8, 0), LayerPlan(0, 5, 3), LayerPlan(2, 3, 3)]
PREFILL = 1e-4

machines = st.builds(
    cost_model,
    host=st.floats(1e-6, 1e-3),
    project=st.floats(1e-6, 1e-3),
    prefill=st.just(PREFILL),
    hidden_share=st.floats(0.3, 2.0),
    overlap=st.booleans(),
)
requests = st.lists(st.tuples(st.integers(64, 8192), st.integers(1, 2048)), min_size=1, max_size=80)


def noise(seed: int, band: float) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: band ** rng.uniform(-1, 1)


def host_only(cost: CostModel) -> CostModel:
    return scaled(cost, {})


def best(cost: CostModel, plan: LayerPlan, history: int, new: int, recompute: bool):
    return plan_restore(
        cost, plan, history, context=0, new=new, allow_recompute=recompute,
    )  # fmt: skip


@settings(max_examples=examples(200))
@given(machines, st.sampled_from(PLANS), requests, st.integers(0, 99), st.booleans())
def test_a_right_profile_never_changes_a_decision(cost, plan, asked, seed, recompute) -> None:
    """Under any noise within the dead band; tries are counted apart."""
    true = host_only(cost)
    machine = SimulatedMachine(true, true, plan, noise(seed, DEAD_BAND * 0.999), recompute)
    tries = refusals = 0
    for history, new in asked:
        found, wanted = machine.serve(history, new), best(true, plan, history, new, recompute)
        if is_try(found):
            tries += 1
            assert found.reason is wanted.reason
        else:
            assert replace(found, copy_seconds=0.0, skips_hidden=False) == wanted
        refusals += not wanted.tokens
    assert machine.costs == true
    assert machine.counters["restore_decision_try"] == tries
    if not plan.hidden:
        assert tries <= 6 + refusals / LAST_GAP


wrong = st.dictionaries(
    st.sampled_from([r for r in Resource if r is not Resource.DISK]),
    st.floats(1 / BOUND, BOUND),
    min_size=1,
)


@settings(max_examples=examples(200))
@given(machines, st.sampled_from(PLANS), wrong, st.integers(0, 99), st.booleans())
def test_a_wrong_profile_is_unlearned(cost, plan, errors, seed, recompute) -> None:
    """After 50 equal requests each costs at most as much more than the best as the dead band
    leaves open, unless a single block was too dear to be tried."""
    true = host_only(cost)
    profile = scaled(true, errors)
    machine = SimulatedMachine(profile, true, plan, noise(seed, 1.02), recompute)
    last = None
    for _ in range(50):
        found = machine.serve(2048, 64)
        last = found if not is_try(found) else last
    assert last is not None
    if machine.counters["restore_decision_try"] < 3 and (not last.tokens or last.skips_hidden):
        seconds = best(machine.costs, plan, 2048, 64, recompute).seconds
        assert not affordable(machine.costs, plan, 2048, context=0, new=64, seconds=seconds)
        return
    assert true_seconds(true, plan, last) <= (DEAD_BAND * 1.02) ** 2 * best(
        true, plan, 2048, 64, recompute
    ).seconds * (1 + 1e-9)


def true_seconds(true: CostModel, plan: LayerPlan, choice) -> float:
    """What the choice for 2,048 tokens and 64 new ones really takes."""
    if not choice.tokens:
        return plan.num_layers * true.prefill_layer(2048 + 64, 0)
    kv = min(plan.kv, plan.num_layers - choice.recompute_layers)
    as_chosen = LayerPlan(
        choice.recompute_layers, plan.num_layers - choice.recompute_layers - kv, kv
    )
    return best(true, as_chosen, choice.tokens, 64 + 2048 - choice.tokens, False).as_stored_seconds


@pytest.mark.parametrize("plan", PLANS[:2])
def test_a_link_ten_times_faster_than_the_profile_says_is_used_within_twenty_requests(
    plan: LayerPlan,
) -> None:
    true = host_only(cost_model(host=2e-5, project=2e-5, prefill=PREFILL, overlap=False))
    errors = dict.fromkeys((Resource.KV_COPY, Resource.HIDDEN_COPY, Resource.PROJECTION), 10.0)
    machine = SimulatedMachine(scaled(true, errors), true, plan, lambda: 1.0, recompute=False)
    found = [machine.serve(800, 64) for _ in range(40)]
    assert is_try(found[0]) and found[1].decision is Decision.REFUSE
    assert all(choice.decision is Decision.LOAD for choice in found[20:])


def test_a_machine_that_was_busy_for_an_hour_is_believed_again() -> None:
    """The link is slow for 300 requests, so that nothing is restored; then it is as measured."""
    cost = host_only(cost_model(host=2e-5, project=1e-9, prefill=PREFILL, overlap=False))
    slow = scaled(cost, {Resource.KV_COPY: 12.0})
    machine = SimulatedMachine(cost, slow, PLANS[0], lambda: 1.0, recompute=False)
    found = [machine.serve(800, 64) for _ in range(300)]
    assert found[0].decision is Decision.LOAD and found[-1].decision is Decision.REFUSE
    refused = [choice for choice in found if not choice.tokens]
    assert len(refused) > 270
    machine.true = cost
    found = [machine.serve(800, 64) for _ in range(4 * (LAST_GAP + 1) + 1)]
    assert found[-1].decision is Decision.LOAD


def test_tries_of_a_right_profile_cost_little() -> None:
    true = host_only(cost_model(host=1.5e-4, project=1e-9, prefill=PREFILL, overlap=False))
    machine = SimulatedMachine(true, true, PLANS[0], lambda: 1.0, recompute=False)
    spent = least = 0.0
    for _ in range(1000):
        choice = machine.serve(2048, 64)
        spent += true_seconds(true, PLANS[0], choice)
        least += best(true, PLANS[0], 2048, 64, False).seconds
    assert machine.counters["restore_decision_refuse"] > 900
    assert spent <= least * (1 + TRY_SHARE * (1 / LAST_GAP + 8 / 1000))
