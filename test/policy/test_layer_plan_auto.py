"""`--hc-forms auto`: which plan a machine gets."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan, StateShape
from sglang_hc.policy.correction import Resource
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.layer_plan import HISTORIES, KEPT, NEW_TOKENS, auto_plan, served_seconds
from sglang_hc.policy.makespan import makespan
from support.profiles import cost_model

SHAPE = StateShape(8, 512, (512, 512), "float16")
HOST, BOTH = (SourceTier.HOST,), (SourceTier.HOST, SourceTier.DISK)


def plan(cost: CostModel, tiers=HOST, hidden: bool = True, recompute: bool = False) -> LayerPlan:
    return auto_plan(cost, SHAPE, tiers, allow_hidden=hidden, allow_recompute=recompute).plan


def test_fast_copies_give_kv_slow_ones_hidden_states_and_between_both() -> None:
    def at(host: float) -> LayerPlan:
        return plan(cost_model(host=host, project=2e-6, prefill=2e-5))

    assert at(1e-7) == LayerPlan(0, 0, 8)
    assert at(1e-4) == LayerPlan(0, 8, 0)
    mixed = at(3e-6)
    assert mixed.hidden and mixed.kv


def test_the_slower_tier_counts() -> None:
    fast_host = cost_model(host=1e-7, disk=1e-4, project=2e-6, prefill=1e-3)
    assert plan(fast_host) == LayerPlan(0, 0, 8)
    assert plan(fast_host, BOTH).hidden


def test_where_copies_do_not_run_beside_compute_nothing_is_mixed() -> None:
    for host in (1e-7, 1e-6, 3e-6, 1e-5, 1e-4):
        chosen = plan(cost_model(host=host, project=2e-6, prefill=1e-3, overlap=False))
        assert chosen.hidden in (0, 8)


def test_something_is_stored_even_where_recomputing_is_the_fastest() -> None:
    cost = cost_model(host=1e-3, project=1e-3, prefill=1e-9)
    assert plan(cost, recompute=True).recompute == 0


def test_a_form_that_the_server_cannot_do_is_not_chosen() -> None:
    cost = cost_model(host=1e-4, project=1e-7, prefill=1e-3)
    assert plan(cost, hidden=False) == LayerPlan(0, 0, 8)
    # Recomputing a layer hides behind the copies of the others.
    near = cost_model(host=1e-4, project=1e-7, prefill=6e-5)
    assert plan(near, recompute=True).recompute > 0
    assert plan(near).recompute == 0


@settings(max_examples=60)
@given(*[st.floats(1e-8, 1e-3) for _ in range(3)], st.floats(0.3, 3), st.booleans())
def test_no_single_form_that_can_be_stored_is_faster(host, project, prefill, share, overlap):
    cost = cost_model(host, 0.0, project, prefill, share, overlap)
    chosen = plan(cost)
    times = [cost.layer_times(SourceTier.HOST, n, new=NEW_TOKENS) for n in HISTORIES]
    worst = max(
        makespan(t, chosen) / min(makespan(t, LayerPlan(0, 8, 0)), makespan(t, LayerPlan(0, 0, 8)))
        for t in times
    )
    # One plan serves both histories; at the other one it may lose what no plan could keep.
    single = min(
        max(makespan(t, one) / min(makespan(t, LayerPlan(0, 8, 0)), makespan(t, LayerPlan(0, 0, 8)))
            for t in times)
        for one in (LayerPlan(0, 8, 0), LayerPlan(0, 0, 8))
    )  # fmt: skip
    assert worst <= max(single, 1.0) * (1 + 1e-9)


def test_the_explanation_names_every_tier_and_rival() -> None:
    cost = cost_model(host=1e-6, disk=1e-5, project=2e-6, prefill=1e-4)
    found = auto_plan(cost, SHAPE, BOTH, allow_hidden=True, allow_recompute=False)
    for part in ("2048 tokens from host in ", "from disk in ", "KV only", "hidden only",
                 "recompute", "bytes a token"):  # fmt: skip
        assert part in found.explanation
    assert "\n" not in found.explanation


@given(st.floats(1e-8, 1e-3), st.floats(1.0, 16.0), st.sampled_from([HOST, BOTH]), st.booleans())
def test_a_plan_is_kept_while_nothing_is_much_faster(host, slower, tiers, overlap) -> None:
    """Blocks on a disk are found under their own plan only."""
    cost = cost_model(host=host, disk=4 * host, project=2e-6, prefill=2e-5, overlap=overlap)
    chosen = plan(cost, tiers)
    cost.plan = chosen
    assert plan(cost, tiers) == chosen
    cost.learned[Resource.KV_COPY] = slower
    other = plan(replace(cost, plan=None), tiers)
    kept = plan(cost, tiers)
    assert kept in (chosen, other)
    for tier in tiers:
        for history in HISTORIES:
            best = served_seconds(cost, other, tier, history, NEW_TOKENS)
            assert served_seconds(cost, kept, tier, history, NEW_TOKENS) <= KEPT * best * (1 + 1e-9)
    if slower < 1.01:
        assert kept == chosen


def test_a_plan_that_this_server_cannot_have_is_not_kept() -> None:
    cost = cost_model(host=1e-7, project=1e-7, prefill=1e-3)
    for plan_before in (LayerPlan(0, 8, 0), LayerPlan(1, 0, 7), LayerPlan(0, 0, 9)):
        cost.plan = plan_before
        assert plan(cost, hidden=False) == LayerPlan(0, 0, 8)
