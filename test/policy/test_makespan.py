"""The closed form against an event simulation that knows nothing of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import Form, LayerPlan
from sglang_hc.policy.makespan import LayerTimes, makespan
from sglang_hc.tools.cli.plan import busy

times = st.builds(
    LayerTimes,
    *[st.floats(0, 10) for _ in range(4)],
    new=st.one_of(st.just(0.0), st.floats(0, 5)),
    start=st.one_of(st.just(0.0), st.floats(0, 50)),
    pieces=st.integers(1, 5),
    overlap=st.booleans(),
    ahead=st.one_of(st.just(math.inf), st.floats(0, 20)),
    weights=st.one_of(st.just(0.0), st.floats(0, 10)),
)
plans = st.builds(LayerPlan, st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))


def simulate(t: LayerTimes, plan: LayerPlan) -> float:
    """End of the last task, by running the copy and the compute resource task by task."""
    if not t.overlap:
        return simulate_one_thread(t, plan)
    copy_free = t.start + plan.recompute * t.weights
    if plan.recompute:
        copy_free = max(copy_free, plan.recompute * (t.recompute + t.new) - t.ahead)
    compute_free = plan.recompute * t.recompute
    for layer in range(plan.num_layers):
        form = plan.form(layer)
        if form is Form.HIDDEN:
            for _ in range(t.pieces):
                copy_free += t.copy_hidden / t.pieces
                compute_free = max(compute_free, copy_free) + t.project / t.pieces
        elif form is Form.KV:
            copy_free += t.copy_kv
            compute_free = max(compute_free, copy_free)
        compute_free += t.new
    return compute_free


def simulate_one_thread(t: LayerTimes, plan: LayerPlan) -> float:
    free = 0.0
    for layer in range(plan.num_layers):
        form = plan.form(layer)
        if form is Form.RECOMPUTE:
            free += t.recompute
        else:
            free = max(free, t.start)
            free += t.copy_kv if form is Form.KV else t.copy_hidden + t.project
        free += t.new
    return free


@given(times, plans)
def test_closed_form_is_the_simulated_end(t, plan):
    assert makespan(t, plan) == pytest.approx(simulate(t, plan), rel=1e-9, abs=1e-9)


@given(times, plans)
def test_no_plan_ends_before_either_resource_has_done_its_work(t, plan):
    copy, compute = busy(t, plan)
    end = makespan(t, plan)
    assert end >= compute - 1e-9
    if plan.hidden + plan.kv:
        assert end >= t.start + copy - 1e-9


def test_a_model_without_hidden_form_is_timed_for_the_other_forms():
    t = LayerTimes(math.inf, 1.0, math.inf, 3.0)
    assert makespan(t, LayerPlan(1, 0, 4)) == 4.0
    assert busy(t, LayerPlan(1, 0, 4)) == (4.0, 3.0)
