"""Costs that correct themselves: bounded, after a few agreeing observations, never by noise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_correction import (
    BOUND,
    DEAD_BAND,
    PRIOR,
    WINDOW,
    CorrectedCosts,
    Resource,
)
from sglang_hc.policy.cost_model import SourceTier
from support.profiles import cost_model

MODEL = cost_model(host=1e-6, disk=5e-6, project=2e-6, prefill=1e-4)
resources = st.sampled_from(list(Resource))


def test_three_agreeing_observations_correct_a_profile_and_two_do_not_in_full() -> None:
    costs = CorrectedCosts(MODEL)
    costs.observe(Resource.KV_COPY, 10.0, 1.0)
    assert costs.model is MODEL
    for _ in range(PRIOR):
        costs.observe(Resource.KV_COPY, 10.0, 1.0)
    assert costs.factor(Resource.KV_COPY) == pytest.approx(0.1)
    assert costs.model.copy_kv(SourceTier.HOST, 100) == pytest.approx(1e-5)
    assert costs.model.copy_hidden(SourceTier.HOST, 100) == MODEL.copy_hidden(SourceTier.HOST, 100)
    assert costs.model.prefill is MODEL.prefill


@given(st.lists(st.tuples(resources, st.floats(1 / 1.29, 1.29)), max_size=60))
def test_within_the_dead_band_the_profile_stays_in_force(seen) -> None:
    costs = CorrectedCosts(MODEL)
    for resource, quotient in seen:
        costs.observe(resource, 1.0, quotient)
    assert costs.model is MODEL and costs.changes == 0


def test_beyond_the_dead_band_it_does_not() -> None:
    costs = CorrectedCosts(MODEL)
    for _ in range(WINDOW):
        costs.observe(Resource.DISK, 1.0, DEAD_BAND * 1.01)
    assert costs.changes == 1 and costs.factor(Resource.DISK) == pytest.approx(DEAD_BAND * 1.01)


@given(st.lists(st.tuples(resources, st.floats(1e-300, 1e300)), max_size=60))
def test_a_factor_never_leaves_its_bounds(seen) -> None:
    costs = CorrectedCosts(MODEL)
    for resource, quotient in seen:
        costs.observe(resource, 1.0, quotient)
        assert costs.factor(resource) * (1 + 1e-12) >= 1 / BOUND
        assert costs.factor(resource) <= BOUND * (1 + 1e-12)


@given(st.integers(0, WINDOW // 2), st.floats(1e-6, 1e6), st.randoms())
def test_less_than_half_a_window_of_nonsense_changes_nothing(count, nonsense, rng) -> None:
    costs = CorrectedCosts(MODEL)
    quotients = [1.0] * (WINDOW - count) + [nonsense] * count
    rng.shuffle(quotients)
    for quotient in [1.0] * WINDOW + quotients:
        costs.observe(Resource.PREFILL, 1.0, quotient)
        assert costs.model is MODEL


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_times_that_say_nothing_are_ignored(bad: float) -> None:
    costs = CorrectedCosts(MODEL)
    for _ in range(WINDOW):
        costs.observe(Resource.KV_COPY, bad, 1.0)
        costs.observe(Resource.KV_COPY, 1.0, bad)
    assert costs.model is MODEL
    assert costs.counts()["cost_observations_kv_copy"] == 0
    assert costs.levels() == {}


def settled(model, **factors: float) -> CorrectedCosts:
    costs = CorrectedCosts(model)
    for name, factor in factors.items():
        for _ in range(WINDOW):
            costs.observe(Resource(name), 1.0, factor)
    return costs


def test_each_resource_corrects_its_own_costs() -> None:
    new = settled(MODEL, kv_copy=2, hidden_copy=3, projection=4, prefill=5, disk=6).model
    host, disk = SourceTier.HOST, SourceTier.DISK
    assert new.copy_kv(host, 1000) == pytest.approx(2 * 1e-3)
    assert new.copy_hidden(host, 1000) == pytest.approx(3 * 0.5e-3)
    assert new.project_kv(1000) == pytest.approx(4 * 2e-3)
    assert new.prefill_layer(1000, 0) == pytest.approx(5 * 1e-1)
    assert new.copy_kv(disk, 1000) == pytest.approx(6 * 5e-3)
    assert new.copy_hidden(disk, 1000) == pytest.approx(6 * 2.5e-3)


def test_what_staging_holds_takes_as_much_longer_as_the_copies_do() -> None:
    costs = settled(replace(MODEL, ahead=0.5), kv_copy=3)
    assert costs.model.ahead == pytest.approx(1.5)


def test_a_store_without_a_profile_is_priced_by_what_its_reads_take() -> None:
    costs = CorrectedCosts(MODEL)
    assert SourceTier.REMOTE not in costs.model.copies
    costs.observe_remote(3e-5)
    assert costs.model.copy_kv(SourceTier.REMOTE, 1000) == pytest.approx(3e-2)
    assert costs.model.copy_hidden(SourceTier.REMOTE, 1000) == pytest.approx(3e-2)
    assert costs.model.copies[SourceTier.DISK] == MODEL.copies[SourceTier.DISK]
    for seconds in (2.9e-5, 3.2e-5, 9e-3):  # within the band, and one that was very slow
        costs.observe_remote(seconds)
    assert costs.changes == 1
    for _ in range(WINDOW):
        costs.observe_remote(6e-5)
    assert costs.model.copy_kv(SourceTier.REMOTE, 1000) == pytest.approx(6e-2)
    for nothing in (0.0, -1.0, math.inf, math.nan):
        costs.observe_remote(nothing)
    assert costs.counts()["cost_observations_remote"] == 4 + WINDOW


def test_a_remote_store_keeps_its_price_when_another_cost_is_corrected() -> None:
    costs = settled(MODEL, disk=4)
    costs.observe_remote(3e-5)
    for _ in range(WINDOW):
        costs.observe(Resource.PREFILL, 1.0, 5.0)
    assert costs.model.copy_kv(SourceTier.REMOTE, 1000) == pytest.approx(3e-2)
    assert costs.model.copy_kv(SourceTier.DISK, 1000) == pytest.approx(4 * 5e-3)


def test_blocks_are_weighed_against_the_read_of_all_their_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk against what the profile says of it; a store against nothing, as no profile has it."""
    costs, seen = CorrectedCosts(MODEL), []
    monkeypatch.setattr(costs, "observe", lambda *args: seen.append(args))
    costs.observe_read(LayerPlan(0, 3, 1), SourceTier.DISK, 10, 7.0)
    predicted = pytest.approx(640 * (5e-6 + 3 * 2.5e-6))
    assert seen == [(Resource.DISK, predicted, 7.0)]
    costs.observe_read(LayerPlan(2, 3, 1), SourceTier.REMOTE, 10, 7.0)
    assert len(seen) == 1
    assert costs.model.copy_kv(SourceTier.REMOTE, 1) == pytest.approx(7.0 / (640 * 4))


def test_what_is_shown_says_which_way_the_profile_is_wrong() -> None:
    costs = settled(MODEL, kv_copy=0.1)
    levels = costs.levels()
    assert levels == {"cost_correction_kv_copy": pytest.approx(0.1)}
    assert costs.counts()["cost_observations_kv_copy"] == WINDOW
    assert costs.counts()["cost_corrections"] == costs.changes > 0
