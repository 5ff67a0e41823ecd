"""The choice at admission: the policy's, counted once per request."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.batch import Load, shared
from sglang_hc.policy.correction import Resource
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.meeting import History, Span
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.restore_plan import Choice, Reason, plan_restore
from support.profiles import cost_model

HOST, DISK, REMOTE = SourceTier.HOST, SourceTier.DISK, SourceTier.REMOTE
PLAN = LayerPlan(1, 2, 3)
LINK = cost_model(host=1e-5, disk=1e-3, project=1e-6, prefill=1e-4)


def choice(cost: CostModel | None, recompute: bool = True) -> tuple[RestorePlanner, Counter]:
    counters: Counter[str] = Counter()
    return RestorePlanner(cost, PLAN, recompute, counters), counters


seconds = st.floats(0, 1e-3)
costs = st.builds(cost_model, seconds, seconds, seconds, seconds, st.floats(0.1, 4), st.booleans())


@given(
    costs,
    st.integers(1, 9000),
    st.integers(0, 9000),
    st.integers(1, 999),
    st.booleans(),
)
def test_it_decides_as_the_policy_does(cost, tokens, context, new, recompute) -> None:
    chooser, counters = choice(cost, recompute)
    plan = plan_restore(
        cost, PLAN, tokens, context=context, new=new, allow_recompute=recompute
    )  # fmt: skip
    found = chooser.choose(tokens, context, new)
    if found.choice is Choice.TRY:
        assert found.reason is plan.reason and found.tokens >= 64
        assert not plan.tokens or plan.recompute_layers >= PLAN.recompute + PLAN.hidden
        return
    assert (found.tokens, found.choice, found.reason) == (
        plan.tokens, plan.choice, plan.reason
    )  # fmt: skip
    if found.tokens:
        assert found.recompute_layers == plan.recompute_layers >= PLAN.recompute
        if not recompute:
            assert found.recompute_layers == PLAN.recompute
    assert not counters, "asking counts nothing"


def test_layers_that_are_recomputed_do_not_use_the_link() -> None:
    chooser, _ = choice(cost_model(host=1e-4, project=1e-9, prefill=6e-5))
    chooser.take(chooser.choose(64, 0, 10))  # all HIDDEN layers are recomputed: one try
    found = chooser.choose(1000, 0, 10)
    assert found.choice is Choice.RECOMPUTE_MORE and found.recompute_layers > PLAN.recompute
    hidden = max(0, 3 - found.recompute_layers)
    kv = 6 - found.recompute_layers - hidden
    assert found.copy_seconds == pytest.approx(1000 * (hidden * 0.5e-4 + kv * 1e-4))


BALANCED = cost_model(host=1e-4, project=1e-9, prefill=1.2e-4, hidden_share=1.0)


def test_restorations_of_a_pass_share_link_and_compute() -> None:
    """Each alone would recompute some layers, and all together too many."""
    counters, stored = Counter[str](), LayerPlan(0, 0, 6)
    chooser = RestorePlanner(BALANCED, stored, True, counters)
    plans = [chooser.choose(1000, 0, 10) for _ in range(4)]
    for plan in plans:
        chooser.take(plan)
    alone = [plan.recompute_layers for plan in plans]
    loads = [Load(1000, 0, layers) for layers in alone]
    way = chooser.share(loads)
    assert way == shared(BALANCED, stored, loads, [(10, 1000)] * 4) != tuple(alone)
    assert counters["restore_decision_recompute_more"] == 4
    assert chooser.share(loads[:1]) == tuple(alone[:1])


def test_what_cannot_be_recomputed_or_is_not_weighed_stays_as_it_is() -> None:
    loads = [Load(1000, 0, 1), Load(500, 64, 1)]
    for chooser in (choice(None)[0], choice(BALANCED, recompute=False)[0]):
        for load in loads:
            chooser.take(chooser.choose(load.tokens, load.context, 10))
        assert chooser.share(loads) == (1, 1)


def test_plans_of_passes_without_restorations_do_not_gather() -> None:
    """Of a recurrent model a state alone may come back, for which nothing is queued."""
    chooser = choice(BALANCED, recompute=False)[0]
    for _ in range(3):
        chooser.take(chooser.choose(1000, 0, 10))
    assert not chooser._taken


def test_an_unmeasured_machine_loads_everything_and_says_so() -> None:
    chooser, counters = choice(None)
    found = chooser.choose(640, 64, 1)
    assert (found.tokens, found.recompute_layers) == (640, PLAN.recompute)
    chooser.take(found)
    assert counters == {"restore_decision_load": 1, "restore_reason_not_measured": 1}
    assert chooser.saved_seconds(0, 64, 0, 1) == float("inf") and chooser.block_seconds(DISK) == 0.0
    assert chooser.token_seconds(DISK) == 8 * chooser.token_seconds(HOST)


def test_what_the_look_at_the_queue_is_told_is_what_copies_of_all_stored_layers_take() -> None:
    model = cost_model(host=1e-6, disk=4e-6, project=1e-6, prefill=1e-3)
    chooser, _ = choice(model)
    layers = 2 * 0.5 + 3  # two of half the size, three of the whole
    assert chooser.token_seconds(HOST) == pytest.approx(layers * 1e-6)
    assert chooser.token_seconds(DISK) == pytest.approx(layers * 5e-6), "read, then copied"
    assert chooser.block_seconds(DISK) == pytest.approx(64 * layers * 4e-6)
    assert chooser.block_seconds(HOST) == 0.0, "it is copied within host memory"


def test_disk_and_store_have_prices_of_their_own_and_the_store_the_one_that_was_seen() -> None:
    costs = cost_model(host=1e-6, disk=4e-6, project=1e-6, prefill=1e-4)
    chooser = RestorePlanner(costs, PLAN, False, Counter())
    mixed = History(0, [Span(DISK, 2048), Span(REMOTE, 2048)], 0, 64)
    assert chooser.block_seconds(REMOTE) == 0.0 and chooser.split(mixed, 0, None) is None
    disk = chooser.block_seconds(DISK)
    for slower in (1e-6, 1e-2, 1e-2, 1e-2):
        costs.observe({Resource.REMOTE: 1.0}, slower)
    layers = PLAN.hidden + PLAN.kv
    assert chooser.block_seconds(REMOTE) == pytest.approx(64 * layers * 1e-2)
    assert chooser.block_seconds(DISK) == disk, "the store's speed is not the disk's"
    split = chooser.split(mixed, 0, None)
    assert split is not None and split.head > 2048, "what lies in the slow store is computed"
    assert chooser.token_seconds(REMOTE) > chooser.token_seconds(DISK) > chooser.token_seconds(HOST)


@pytest.mark.parametrize("may", [True, False])
def test_blocks_are_restored_as_they_come_only_where_they_can_be(may: bool) -> None:
    costs = cost_model(host=0.25, disk=0.25)
    plan, counts = LayerPlan(0, 0, 8), Counter[str]()
    chooser = RestorePlanner(costs, plan, True, counts, as_they_come=may)
    split = chooser.split(History(0, [Span(SourceTier.DISK, 4096)], 0, 64), 0, 64)
    assert split is not None and split.as_they_come == may


def test_a_disk_of_unknown_speed_is_taken_for_no_slower_than_time_allows() -> None:
    model = cost_model(host=1e-6, project=1e-6, prefill=1e-3)
    copies = {SourceTier.HOST: model.copies[SourceTier.HOST]}
    chooser, _ = choice(dataclasses.replace(model, copies=copies))
    assert chooser.block_seconds(DISK) == 0.0
    assert chooser.token_seconds(DISK) == 8 * chooser.token_seconds(HOST)


def test_reading_what_would_not_be_restored_saves_nothing() -> None:
    slow_link, _ = choice(cost_model(host=1e-2, disk=1e-2, project=1e-6, prefill=1e-6))
    fast_link, _ = choice(cost_model(host=1e-6, disk=2e-6, project=1e-6, prefill=1e-3))
    for host in (0, 1000):
        assert slow_link.saved_seconds(host, 1000, 0, 10) < 0
        assert fast_link.saved_seconds(host, 1000, 0, 10) > 0


@given(costs, *[st.integers(0, 5000) for _ in range(3)], st.integers(1, 999))
def test_a_wait_is_worth_what_it_saves(cost, host, disk, context, new) -> None:
    """Waiting in vain is at most as long as the recomputation that follows."""
    chooser, _ = choice(cost)
    saved = chooser.saved_seconds(host, max(1, disk), context, new)
    recompute = PLAN.num_layers * cost.prefill_layer(host + max(1, disk) + new, context)
    assert saved <= recompute * (1 + 1e-9)


def test_what_is_saved_is_the_time_to_recompute_what_would_come() -> None:
    chooser, _ = choice(cost_model(prefill=1e-3), recompute=False)
    saved = chooser.saved_seconds(0, 1000, 0, 10)
    assert saved == pytest.approx(5 * 1.0)  # one layer is never stored


DEAR = cost_model(host=1.5e-4, disk=9.0, project=1e-9, prefill=1e-4, overlap=False)


def test_a_refusal_is_tried_now_and_then_and_counted_apart() -> None:
    chooser, counters = choice(DEAR, recompute=False)
    choices = []
    for _ in range(9):
        found = chooser.choose(1024, 0, 64)
        choices.append(found.choice)
        assert found == chooser.choose(1024, 0, 64), "asking changes nothing"
        if found.tokens:
            assert found.recompute_layers == PLAN.recompute and found.copy_seconds > 0
            chooser.take(found)
        else:
            chooser.refuse(found.reason)
    assert [n for n, choice in enumerate(choices) if choice is Choice.TRY] == [0, 2, 5]
    assert counters["restore_decision_try"] == 3 and counters["restore_decision_refuse"] == 6
    assert counters["restore_reason_fast_compute"] == 9


def test_a_refusal_that_the_costs_did_not_decide_brings_no_try_nearer() -> None:
    chooser, _ = choice(DEAR, recompute=False)
    chooser.take(chooser.choose(1024, 0, 64))
    for _ in range(9):
        chooser.refuse(Reason.NO_DEVICE_SLOTS)
    assert chooser.choose(1024, 0, 64).choice is Choice.REFUSE
    chooser.refuse(Reason.FAST_COMPUTE)
    assert chooser.choose(1024, 0, 64).choice is Choice.TRY


def test_corrected_costs_decide_from_the_next_request_on() -> None:
    costs = dataclasses.replace(DEAR)
    chooser = RestorePlanner(costs, PLAN, False, Counter())
    assert chooser.choose(1024, 0, 64).choice is Choice.TRY
    before = chooser.block_seconds(DISK)
    for _ in range(7):
        for resource in (Resource.KV_COPY, Resource.HIDDEN_COPY, Resource.DISK):
            costs.observe({resource: 10.0}, 1.0)
    assert chooser.choose(1024, 0, 64).choice is Choice.LOAD
    assert chooser.block_seconds(DISK) == pytest.approx(before / 10)


def test_always_restores_and_fetches_whatever_it_costs() -> None:
    counters: Counter[str] = Counter()
    costs = cost_model(host=9.0, disk=9.0, project=9.0, prefill=1e-9)
    chooser = RestorePlanner(costs, PLAN, True, counters, always=True)
    found = chooser.choose(640, 64, 1)
    assert (found.tokens, found.recompute_layers, found.copy_seconds) == (640, PLAN.recompute, 0.0)
    chooser.take(found)
    assert counters == {"restore_decision_load": 1, "restore_reason_always": 1}
    assert chooser.saved_seconds(0, 64, 0, 1) == float("inf") and chooser.block_seconds(DISK) == 0.0
    assert chooser.tries is None and chooser.try_seconds(0, 99) == 0.0
    assert chooser.token_seconds(HOST) > 0, "ready-first still compares by what things cost"
