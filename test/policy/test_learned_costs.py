"""Costs that correct themselves: bounded, after a few agreeing observations, never by noise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.correction import BOUND, PRIOR, STEP, WINDOW, Resource
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.fit import Fit
from support.profiles import cost_model

resources = st.sampled_from([r for r in Resource if r is not Resource.REMOTE])


def fresh() -> CostModel:
    return cost_model(host=1e-6, disk=5e-6, project=2e-6, prefill=1e-4)


def factors(costs: CostModel) -> dict[str, float]:
    return {name.removeprefix("cost_correction_"): value for name, value in costs.levels().items()}


def test_three_agreeing_observations_correct_a_cost_and_two_do_not_in_full() -> None:
    costs = fresh()
    costs.observe({Resource.KV_COPY: 10.0}, 1.0)
    assert costs.learned == {Resource.KV_COPY: 1.0}
    for _ in range(PRIOR):
        costs.observe({Resource.KV_COPY: 10.0}, 1.0)
    assert costs.learned == {Resource.KV_COPY: pytest.approx(0.1)}
    assert costs.copy_kv(SourceTier.HOST, 100) == pytest.approx(1e-5)
    assert costs.copy_hidden(SourceTier.HOST, 100) == fresh().copy_hidden(SourceTier.HOST, 100)
    assert costs.prefill_layer(100, 9) == fresh().prefill_layer(100, 9)


@pytest.mark.parametrize(("factor", "changes"), [(STEP / 1.01, 0), (STEP * 1.01, 1)])
def test_only_large_changes_are_counted(factor: float, changes: int) -> None:
    """However many small ones they are made of."""
    costs = fresh()
    for part in range(1, 21):
        for _ in range(WINDOW):
            costs.observe({Resource.DISK: 1.0}, factor ** (part / 20))
    assert costs.changes == costs.counts()["cost_corrections"] == changes
    assert costs.learned[Resource.DISK] > 1.0


@given(st.lists(st.tuples(resources, st.floats(1e-300, 1e300)), max_size=60))
def test_a_factor_never_leaves_its_bounds(seen) -> None:
    costs = fresh()
    for resource, quotient in seen:
        costs.observe({resource: 1.0}, quotient)
        factor = costs.learned.get(resource, 1.0)
        assert factor * (1 + 1e-12) >= 1 / BOUND and factor <= BOUND * (1 + 1e-12)


@given(st.integers(0, WINDOW // 2), st.floats(1e-6, 1e6), st.randoms())
def test_less_than_half_a_window_of_nonsense_changes_nothing(count, nonsense, rng) -> None:
    costs = fresh()
    quotients = [1.0] * (WINDOW - count) + [nonsense] * count
    rng.shuffle(quotients)
    for quotient in [1.0] * WINDOW + quotients:
        costs.observe({Resource.PREFILL: 1.0}, quotient)
        assert costs.learned == {Resource.PREFILL: 1.0}


def test_what_was_expected_is_told_beside_what_it_took() -> None:
    """By the costs in force: a cost that has learned expects what it sees."""
    costs = fresh()
    for _ in range(2 * WINDOW):
        costs.observe({Resource.KV_COPY: 10.0}, 5.0)
    assert costs.ratios[0] == (Resource.KV_COPY, 2.0)
    assert costs.ratios[-1] == (Resource.KV_COPY, pytest.approx(1.0))
    costs.observe({Resource.DISK: 1e150}, 1e-150)
    assert costs.ratios[-1] == (Resource.DISK, BOUND**2)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_times_that_say_nothing_are_ignored(bad: float) -> None:
    costs = fresh()
    for _ in range(WINDOW):
        costs.observe({Resource.KV_COPY: bad}, 1.0)
        costs.observe({Resource.KV_COPY: 1.0}, bad)
        costs.observe({}, 1.0)
    assert costs == fresh()
    assert costs.counts()["cost_observations_kv_copy"] == 0
    assert costs.levels() == {}


def settled(costs: CostModel, **wanted: float) -> CostModel:
    for name, factor in wanted.items():
        for _ in range(WINDOW):
            costs.observe({Resource(name): 1.0}, factor)
    return costs


def test_each_resource_corrects_its_own_costs() -> None:
    new = replace(fresh(), prefill=Fit(0.0, 1e-4, 1e-7, per_context=1e-6))
    settled(new, kv_copy=2, hidden_copy=3, projection=4, prefill=5, disk=6, attention=7)
    host, disk = SourceTier.HOST, SourceTier.DISK
    assert new.copy_kv(host, 1000) == pytest.approx(2 * 1e-3)
    assert new.copy_hidden(host, 1000) == pytest.approx(3 * 0.5e-3)
    assert new.project_kv(1000) == pytest.approx(4 * 2e-3)
    attention = 1e-7 * 1000 * (4000 + 500) + 1e-6 * 4000
    assert new.prefill_layer(1000, 4000) == pytest.approx(5 * 1e-1 + 7 * attention)
    assert new.copy_kv(disk, 1000) == pytest.approx(6 * 5e-3)
    assert new.copy_hidden(disk, 1000) == pytest.approx(6 * 2.5e-3)


def test_what_staging_holds_takes_as_much_longer_as_the_copies_do() -> None:
    costs = settled(replace(fresh(), ahead=0.5), kv_copy=3)
    assert costs.layer_times(SourceTier.HOST, 64).ahead == pytest.approx(1.5)


def test_what_shares_a_time_shares_its_ratio() -> None:
    costs = fresh()
    for _ in range(WINDOW):
        costs.observe({Resource.KV_COPY: 1.0, Resource.HIDDEN_COPY: 3.0}, 8.0)
    assert factors(costs) == {"kv_copy": pytest.approx(2.0), "hidden_copy": pytest.approx(2.0)}


def test_what_was_learned_counts_in_what_is_expected_next() -> None:
    """The parts are as they were measured, so a time that comes in late is not corrected twice."""
    costs = settled(fresh(), kv_copy=4)
    for _ in range(WINDOW):
        costs.observe({Resource.KV_COPY: 1.0, Resource.HIDDEN_COPY: 4.0}, 4.0 + 4.0)
    assert factors(costs) == {
        "kv_copy": pytest.approx(4.0, rel=1e-6), "hidden_copy": pytest.approx(1.0, rel=1e-6),
    }  # fmt: skip


def test_a_store_without_a_profile_is_priced_by_what_its_reads_take() -> None:
    costs, remote = fresh(), SourceTier.REMOTE
    assert not costs.knows(remote)
    with pytest.raises(KeyError, match="no costs for tier remote"):
        costs.copy_kv(remote, 1)
    costs.observe({Resource.REMOTE: 1.0}, 3e-5)
    assert costs.knows(remote)
    assert costs.copy_kv(remote, 1000) == pytest.approx(3e-2)
    assert costs.copy_hidden(remote, 1000) == pytest.approx(3e-2)
    assert costs.copies == fresh().copies
    for seconds in (2.9e-5, 3.1e-5, 9e-3):  # one was very slow
        costs.observe({Resource.REMOTE: 1.0}, seconds)
    assert costs.changes == 1
    settled(costs, remote=6e-5)
    assert costs.copy_kv(remote, 1000) == pytest.approx(6e-2)
    assert costs.counts()["cost_observations_remote"] == 4 + WINDOW
    assert costs.levels() == {}, "seconds are no factor"


def test_a_remote_store_keeps_its_price_when_another_cost_is_corrected() -> None:
    costs = settled(fresh(), disk=4)
    costs.observe({Resource.REMOTE: 1.0}, 3e-5)
    settled(costs, prefill=5)
    assert costs.copy_kv(SourceTier.REMOTE, 1000) == pytest.approx(3e-2)
    assert costs.copy_kv(SourceTier.DISK, 1000) == pytest.approx(4 * 5e-3)


def test_blocks_are_weighed_against_the_read_of_all_their_layers() -> None:
    """A disk against what the profile says of it; a store against nothing, as no profile has it."""
    costs, plan = fresh(), LayerPlan(0, 3, 1)
    for _ in range(WINDOW):
        costs.observe_read(plan, SourceTier.DISK, 10, 0.02)
    assert costs.copy_stored(SourceTier.DISK, plan, 640) == pytest.approx(0.02)
    costs.observe_read(LayerPlan(2, 3, 1), SourceTier.REMOTE, 10, 7.0)
    assert costs.copy_kv(SourceTier.REMOTE, 1) == pytest.approx(7.0 / (640 * 4))


def test_reads_from_a_tier_without_costs_are_ignored() -> None:
    costs = replace(fresh(), copies={SourceTier.HOST: fresh().copies[SourceTier.HOST]})
    costs.observe_read(LayerPlan(0, 0, 4), SourceTier.DISK, 10, 7.0)
    assert costs.learned == {} and not costs.knows(SourceTier.DISK)


def test_what_was_learned_is_where_the_next_server_begins() -> None:
    """And a first observation of another machine does not turn it."""
    before = settled(fresh(), kv_copy=4, remote=6e-5)
    costs = replace(before)
    assert costs.copy_kv(SourceTier.HOST, 1000) == pytest.approx(4e-3)
    assert costs.copy_kv(SourceTier.REMOTE, 1000) == pytest.approx(6e-2)
    assert costs.levels() == {"cost_correction_kv_copy": pytest.approx(4.0)}
    costs.observe({Resource.KV_COPY: 1.0}, 1.0)
    assert costs.copy_kv(SourceTier.HOST, 1000) == pytest.approx(4e-3)
    settled(costs, kv_copy=1)
    assert costs.copy_kv(SourceTier.HOST, 1000) == pytest.approx(1e-3)
    assert before.copy_kv(SourceTier.HOST, 1000) == pytest.approx(4e-3), "each learns on its own"


SHAPES = [(64, 0), (512, 0), (2048, 0), (64, 4096), (512, 8000), (8000, 0)]
factor = st.floats(1 / 4, 4)
two_shapes = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=2, unique=True)


@given(factor, factor, two_shapes, st.randoms(use_true_random=False))
def test_attention_and_the_rest_are_told_apart_by_prefills_of_different_lengths(
    rest: float, attention: float, served: list[tuple[int, int]], rng
) -> None:
    """After 20 prefills what was served is predicted within 15 %, however the probe was wrong."""
    known = Fit(1e-3, 1e-4, 3e-8, per_context=2e-6, floor=5e-3)
    costs = replace(fresh(), prefill=known)

    def true(size: tuple[int, int]) -> float:
        part, other = known.batch([size])
        return attention * part + rest * other

    for number in range(20):
        size = served[number % len(served)]
        part, other = known.batch([size])
        parts = {Resource.ATTENTION: part, Resource.PREFILL: other}
        busy = 3.0 if number == 8 else 1.0
        costs.observe(parts, busy * true(size) * rng.uniform(0.97, 1.03))
    for size in served:
        assert costs.prefill_layer(*size) == pytest.approx(true(size), rel=0.15)


def test_a_nonsense_time_of_two_resources_spoils_nothing() -> None:
    costs = fresh()
    parts = {Resource.KV_COPY: 1.0, Resource.HIDDEN_COPY: 2.0}
    for seconds in (3.0, 1e-300, 3.0, 1e300, 3.0):
        costs.observe(parts, seconds)
    assert factors(costs) == {"kv_copy": pytest.approx(1.0), "hidden_copy": pytest.approx(1.0)}


def test_a_part_that_takes_nothing_goes_with_the_other() -> None:
    costs = fresh()
    for _ in range(WINDOW):
        costs.observe({Resource.ATTENTION: 0.0, Resource.PREFILL: 1.0}, 3.0)
    assert factors(costs) == {"attention": pytest.approx(3.0), "prefill": pytest.approx(3.0)}
