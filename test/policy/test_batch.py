"""Restorations of one pass: the model of their batch, and who recomputes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan
from sglang_hc.policy import batch
from sglang_hc.policy.batch import HOST, Load, batch_ends, first_come, shared
from sglang_hc.policy.cost_model import CostModel, TierCopy
from sglang_hc.policy.fit import Fit
from sglang_hc.policy.makespan import makespan
from sglang_hc.policy.restore_plan import best_prefix
from support.examples import examples
from support.papers import A100, SHAPE

rate, fixed = st.floats(1e-8, 1e-4), st.one_of(st.just(0.0), st.floats(1e-6, 1e-3))
lines = st.builds(Fit, fixed, rate)
machines = st.builds(
    CostModel,
    st.just("drawn"),
    st.just("measured"),
    st.fixed_dictionaries({HOST: st.builds(TierCopy, kv=lines, hidden=lines)}),
    st.builds(Fit, fixed, rate, st.floats(0, 1e-9)),
    lines,
    ahead=st.one_of(st.just(math.inf), st.floats(0, 0.1)),
)
plans = st.builds(LayerPlan, st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)).filter(
    lambda plan: plan.hidden + plan.kv > 0
)
spans = st.tuples(st.integers(1, 9000), st.integers(0, 4000), st.integers(1, 400))


def drawn(
    cost: CostModel, stored: LayerPlan, chosen: list[tuple[int, int, int]]
) -> tuple[list[Load], list[tuple[int, int]]]:
    """Restorations that are planned alone, and what runs behind them."""
    loads, new = [], []
    for tokens, context, rest in chosen:
        times = cost.layer_times(HOST, tokens, context=context, new=rest)
        loads.append(Load(tokens, context, best_prefix(times, stored)[1]))
        new.append((rest, context + tokens))
    return loads, new


@given(machines, plans, spans, st.integers(0, 5))
def test_a_batch_of_one_is_the_restoration_alone(cost, stored, span, more) -> None:
    loads, new = drawn(cost, stored, [span])
    layers = min(stored.recompute + more, stored.num_layers - 1)
    kv = min(stored.kv, stored.num_layers - layers)
    times = cost.layer_times(HOST, span[0], context=span[1], new=span[2])
    alone = makespan(times, LayerPlan(layers, stored.num_layers - layers - kv, kv))
    assert batch_ends(cost, stored, loads, new, [(layers,)])[0] == pytest.approx(alone)


@given(machines, plans, st.lists(spans, min_size=2, max_size=5))
@settings(max_examples=examples(200))
def test_never_later_than_first_come_or_each_for_itself(cost, stored, chosen) -> None:
    loads, new = drawn(cost, stored, chosen)
    way = shared(cost, stored, loads, new)
    others = [first_come(cost, stored, loads, new), tuple(load.recompute for load in loads)]
    end, *theirs = batch_ends(cost, stored, loads, new, [way, *others])
    assert end <= min(theirs)
    assert all(stored.recompute <= layers < stored.num_layers for layers in way)


@given(machines, plans, st.lists(spans, min_size=2, max_size=3))
@settings(max_examples=examples(100))
def test_it_is_near_the_best_of_all_ways(cost, stored, chosen) -> None:
    """Whole layers of few restorations are coarse: the best mix may be between two of the ways."""
    loads, new = drawn(cost, stored, chosen)
    possible = range(stored.recompute, stored.num_layers)
    every = list(itertools.product(possible, repeat=len(loads)))
    way = shared(cost, stored, loads, new)
    end = batch_ends(cost, stored, loads, new, [way])[0]
    assert end <= 1.25 * batch_ends(cost, stored, loads, new, every).min()


@given(machines, plans, st.lists(spans, min_size=2, max_size=4))
def test_where_nothing_is_shared_each_is_as_it_is_alone(cost, stored, chosen) -> None:
    """One thread that copies and computes, and a single restoration."""
    loads, new = drawn(cost, stored, chosen)
    alone = tuple(load.recompute for load in loads)
    assert shared(replace(cost, overlap=False), stored, loads, new) == alone
    assert shared(cost, stored, loads[:1], new[:1]) == alone[:1]


@given(machines, plans, st.lists(spans, min_size=2, max_size=4), st.integers(0, 6))
def test_a_request_may_have_several_restorations_or_none(cost, stored, chosen, known) -> None:
    """Parts of a history that were restored ahead leave others; a refusal leaves nothing."""
    loads, new = drawn(cost, stored, chosen)
    way = shared(cost, stored, loads, (new * 2)[:known])
    assert len(way) == len(loads)
    assert all(stored.recompute <= layers < stored.num_layers for layers in way)


@pytest.mark.parametrize(("layers", "wanted"), [(32, 63), (33, 33)])
def test_so_many_ways_are_compared_at_most(layers: int, wanted: int, monkeypatch) -> None:
    """Of two restorations each may recompute all layers but one: 2 * (layers - 1) + 1 ways."""
    compared = []

    def ends(*args):
        compared.append(args[-1])
        return batch_ends(*args)

    monkeypatch.setattr(batch, "batch_ends", ends)
    loads = [Load(1000, 0, 0), Load(2000, 0, 0)]
    shared(A100, LayerPlan(0, 0, layers), loads, [(100, 1000), (100, 2000)])
    (ways,) = compared
    assert len(ways) == 2 + wanted, "beside each alone, and first come"
    assert wanted <= batch.WAYS < 2 * (33 - 1) + 1


def test_shorter_histories_are_recomputed_before_longer_ones() -> None:
    """Their attention costs less for each token that is not copied."""
    stored = LayerPlan(0, 0, SHAPE.num_layers)
    loads, new = drawn(A100, stored, [(8192, 0, 64), (1024, 0, 64), (4096, 0, 64)])
    long, short, middle = shared(A100, stored, loads, new)
    assert long <= middle <= short and short > loads[1].recompute


def test_eight_at_once_are_not_recomputed_for_a_link_that_they_share() -> None:
    """Each saw the copies of those before it, but not what they computed: the last one recomputed
    nearly everything, and the batch took twice as long as if all had been loaded."""
    stored = LayerPlan(0, 0, SHAPE.num_layers)
    loads, new = drawn(A100, stored, [(1024, 0, 64)] * 8)
    ways = [shared(A100, stored, loads, new), first_come(A100, stored, loads, new), (0,) * 8]
    together, first, loaded = batch_ends(A100, stored, loads, new, ways)
    assert together < loaded < first / 1.5
