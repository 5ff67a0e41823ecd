import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import LONG_HISTORY, CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit
from sglang_hc.policy.makespan import LayerTimes, makespan
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.restore_plan import Choice, Reason, RestorePlan, best_prefix, plan_restore
from support.examples import examples
from support.papers import A100, SHAPE
from support.profiles import cost_model

LAYERS = SHAPE.num_layers
PAPER_PLAN = LayerPlan(0, 31, 1)


def restore(tokens: int, **circumstances) -> RestorePlan:
    return plan_restore(
        circumstances.pop("cost", A100),
        circumstances.pop("stored", PAPER_PLAN),
        tokens,
        **{"context": 0, "new": 64} | circumstances,
    )


def recomputed(tokens: int, context: int = 0) -> float:
    return LAYERS * A100.prefill_layer(tokens + 64, context)


# Seven orders of magnitude between machines, far more than any pair of real ones.
rate = st.floats(1e-9, 1e-2)
fixed = st.one_of(st.just(0.0), st.floats(1e-6, 1e-2))
lines = st.builds(Fit, fixed, rate, floor=fixed)
copies = st.builds(TierCopy, kv=lines, hidden=lines)
machines = st.builds(
    CostModel,
    st.just("drawn"),
    st.just("measured"),
    st.fixed_dictionaries({tier: copies for tier in SourceTier}),
    st.builds(Fit, fixed, rate, st.floats(0, 1e-6), floor=fixed),
    lines,
    overlap=st.booleans(),
    ahead=st.one_of(st.just(math.inf), st.floats(0, 1)),
)
stored_plans = st.builds(LayerPlan, st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)).filter(
    lambda plan: plan.num_layers > 0
)
histories = st.integers(1, 12_288)
load = st.fixed_dictionaries(
    {
        "context": st.integers(0, 8192),
        "new": st.integers(0, 512),
        "first": st.floats(0, 1),
        "allow_recompute": st.booleans(),
    }
)


@given(machines, stored_plans, histories, load)
@settings(max_examples=examples(300))
def test_never_slower_than_a_single_way_on_any_machine(cost, stored, tokens, load):
    """Against every candidate, each timed from the cost model as if there were no planner."""
    context, new = load["context"], load["new"]
    plan = plan_restore(cost, stored, tokens, **load)
    recompute = stored.num_layers * cost.prefill_layer(tokens + new, context)
    candidates = {(0, 0): recompute}
    times = LayerTimes(
        cost.copy_hidden(SourceTier.HOST, tokens),
        cost.copy_kv(SourceTier.HOST, tokens),
        cost.project_kv(tokens),
        cost.prefill_layer(tokens, context),
        cost.prefill_layer(new, context + tokens),
        load["first"],
        overlap=cost.overlap,
        ahead=cost.ahead,
    )
    last = stored.num_layers if load["allow_recompute"] else stored.recompute + 1
    for r in range(stored.recompute, min(last, stored.num_layers)):
        hidden = max(0, stored.recompute + stored.hidden - r)
        loaded = LayerPlan(r, hidden, stored.num_layers - r - hidden)
        candidates[tokens, r] = makespan(times, loaded)
    assert plan.seconds == pytest.approx(min(candidates.values()), rel=1e-9)
    assert plan.seconds <= recompute
    if stored.recompute < stored.num_layers:
        as_stored = candidates[tokens, stored.recompute]
        assert plan.as_stored_seconds == pytest.approx(as_stored)
        assert plan.seconds <= as_stored * (1 + 1e-9)
    if plan.choice is not Choice.REFUSE:
        chosen = candidates[plan.tokens, plan.recompute_layers]
        assert chosen == pytest.approx(plan.seconds)
        assert plan.recompute_layers >= stored.recompute
        assert load["allow_recompute"] or plan.recompute_layers == stored.recompute


@given(st.builds(LayerTimes, *[st.floats(0, 1) for _ in range(5)], start=st.floats(0, 50),
                 pieces=st.integers(1, 4), overlap=st.booleans(),
                 ahead=st.one_of(st.just(math.inf), st.floats(0, 5)),
                 weights=st.one_of(st.just(0.0), st.floats(0, 1))), stored_plans)  # fmt: skip
def test_search_over_layers_is_exact(times, stored):
    if stored.recompute == stored.num_layers:
        stored = LayerPlan(stored.recompute, 0, 1)
    seconds, _ = best_prefix(times, stored)
    hidden_end = stored.recompute + stored.hidden
    every = [
        makespan(times, LayerPlan(r, max(0, hidden_end - r), min(stored.kv, stored.num_layers - r)))
        for r in range(stored.recompute, stored.num_layers)
    ]
    assert seconds == pytest.approx(min(every), rel=1e-9, abs=1e-12)


def test_an_idle_machine_loads_what_was_planned_for_it():
    plan = restore(2048)
    assert (plan.choice, plan.reason) == (Choice.LOAD, Reason.AS_STORED)
    assert (plan.tokens, plan.recompute_layers) == (2048, 0)
    assert plan.seconds == plan.as_stored_seconds < recomputed(2048)


def test_other_copies_that_go_first_let_it_recompute_layers_and_then_refuse():
    seen = [restore(2048, first=first) for first in (0.0, 0.05, 0.1, 0.5)]
    assert [plan.choice for plan in seen] == [
        Choice.LOAD,
        Choice.RECOMPUTE_MORE,
        Choice.RECOMPUTE_MORE,
        Choice.REFUSE,
    ]
    layers = [plan.recompute_layers for plan in seen[:3]]
    assert layers == sorted(set(layers))
    assert seen[3].tokens == 0
    assert seen[3].seconds == recomputed(2048)


def test_a_short_history_is_not_worth_the_fixed_cost_of_its_copies():
    slow_start = CostModel(
        "test", "measured",
        {SourceTier.HOST: TierCopy(Fit(2e-3, 6e-7), Fit(2e-3, 3e-7))},
        Fit(1e-4, 2e-6, 1e-11), Fit(1e-4, 3e-7),
    )  # fmt: skip
    short = restore(64, cost=slow_start)
    assert (short.choice, short.reason) == (Choice.REFUSE, Reason.SHORT_HISTORY)
    assert restore(16384, cost=slow_start).choice is not Choice.REFUSE


def test_compute_that_outruns_the_link_refuses_whatever_the_history():
    fast = CostModel(
        "test", "measured",
        {SourceTier.HOST: TierCopy(Fit(0.0, 1e-3), Fit(0.0, 1e-3))},
        Fit(0.0, 1e-6, 0.0), Fit(0.0, 1e-7),
    )  # fmt: skip
    for tokens in (64, 16384):
        plan = restore(tokens, cost=fast)
        assert (plan.choice, plan.reason) == (Choice.REFUSE, Reason.FAST_COMPUTE)


def test_layers_that_were_never_stored_are_always_recomputed():
    plan = restore(4096, stored=LayerPlan(4, 28, 0))
    assert plan.choice is Choice.LOAD
    assert plan.recompute_layers == 4


@pytest.mark.parametrize(("stored", "tokens"), [(PAPER_PLAN, 0), (LayerPlan(LAYERS, 0, 0), 640)])
def test_nothing_stored_is_a_reason_of_its_own(stored, tokens):
    plan = restore(tokens, stored=stored)
    assert (plan.choice, plan.reason) == (Choice.REFUSE, Reason.NOTHING_STORED)
    assert plan.seconds == recomputed(tokens)


def test_a_model_without_hidden_form_is_restored_from_kv():
    kv_only = CostModel(
        "test", "measured", {SourceTier.HOST: TierCopy(Fit(0.0, 1e-7))}, Fit(0.0, 1e-5, 0.0)
    )
    plan = restore(1024, cost=kv_only, stored=LayerPlan(0, 0, LAYERS))
    assert plan.choice is Choice.LOAD
    assert plan.seconds == pytest.approx(1024 * 1e-7 + LAYERS * 64 * 1e-5)


def test_an_unknown_tier_is_an_error_of_the_caller():
    with pytest.raises(KeyError, match="no costs for tier remote, only for host, disk"):
        A100.layer_times(SourceTier.REMOTE, 64)


@given(
    *(st.floats(1e-8, 1e-4),) * 2, st.integers(1, 9000), st.integers(0, 9000),
    st.integers(1, 999), st.floats(0, 9000),
)  # fmt: skip
def test_what_comes_with_any_restoration_is_weighed(
    copied: float, prefill: float, tokens: int, context: int, new: int, end: float
) -> None:
    cost = cost_model(host=copied, prefill=prefill)
    stored = LayerPlan(0, 0, 4)
    planner = RestorePlanner(cost, stored, False, Counter(), end_tokens=end)
    plan = planner.choose(tokens, context, new)
    recomputed = stored.num_layers * cost.prefill_layer(tokens + new, context)
    beside = end * cost.copy_stored(SourceTier.HOST, stored, LONG_HISTORY) / LONG_HISTORY
    if plan.choice is Choice.LOAD:
        assert beside < recomputed
        whole = beside + cost.copy_stored(SourceTier.HOST, stored, tokens)
        assert plan.copy_seconds == pytest.approx(whole)
    alone = RestorePlanner(cost, stored, False, Counter()).choose(tokens, context, new)
    assert plan.choice is not Choice.LOAD or alone.choice is Choice.LOAD
