"""Which layers are in host memory, and how long passes grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.correction import Resource
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.fit import Fit
from sglang_hc.policy.makespan import makespan
from sglang_hc.policy.offload import (
    FEWEST,
    LONGEST_CHUNK,
    balanced_chunk,
    fitting,
    holding,
    spread,
)
from sglang_hc.policy.restore_plan import Choice, plan_restore
from sglang_hc.profile_file import decode, encode
from support.profiles import cost_model

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=90)


@given(st.integers(1, 90), st.integers(1, 90))
def test_layers_are_spread_evenly(count: int, layers: int) -> None:
    count = min(count, layers)
    chosen = spread(count, layers)
    assert len(set(chosen)) == count and all(0 <= layer < layers for layer in chosen)
    gaps = [b - a for a, b in zip(chosen, (*chosen[1:], chosen[0] + layers), strict=True)]
    assert max(gaps) - min(gaps) <= 1


@given(SIZES, st.integers(0, 100_000))
def test_as_many_layers_as_hold_what_was_asked_for(sizes: list[int], wanted: int) -> None:
    chosen = holding(wanted, sizes)
    held = sum(sizes[layer] for layer in chosen)
    if not wanted:
        assert chosen == ()
    else:
        assert held >= min(wanted, sum(sizes)) and len(chosen) >= min(FEWEST, len(sizes))
        if len(chosen) > FEWEST:
            fewer = spread(len(chosen) - 1, len(sizes))
            assert sum(sizes[layer] for layer in fewer) < wanted


@given(SIZES, st.integers(0, 100_000))
def test_what_does_not_fit_is_in_host_memory(sizes: list[int], room: int) -> None:
    """The ring's two places count, whichever layers they have to hold."""

    def taken(chosen: tuple[int, ...]) -> int:
        hosted = [sizes[layer] for layer in chosen]
        return sum(sizes) - sum(hosted) + 2 * max(hosted, default=0)

    chosen = fitting(room, sizes)
    every = tuple(range(len(sizes)))
    if chosen is None:
        assert taken(every) > room and sum(sizes) > room
    else:
        assert taken(chosen) <= room and (chosen == () or sum(sizes) > room)
        if len(chosen) > FEWEST:
            assert taken(spread(len(chosen) - 1, len(sizes))) > room


def test_a_pass_grows_until_it_computes_for_as_long_as_weights_take() -> None:
    fit = Fit(0.0, 1e-6)
    assert balanced_chunk(fit, 0.0, 2048, 99_999) == 2048
    assert balanced_chunk(fit, 2e-3, 2048, 99_999) == 2048
    assert balanced_chunk(fit, 5e-3, 2048, 99_999) == 6144
    assert balanced_chunk(fit, 5e-3, 2048, 6143) == 4096, "no more than there is room for"
    assert balanced_chunk(fit, 1.0, 2048, 99_999) == LONGEST_CHUNK


LINK = cost_model(host=1e-6, project=1e-6, prefill=1e-5)


def test_a_layer_takes_at_least_as_long_as_its_weights() -> None:
    model = replace(LINK, weights=1e-3)
    assert model.prefill_layer(10, 0) == 1e-3 and model.prefill_layer(1000, 0) == 1e-2
    assert model.prefill_layer(0, 500) == 0.0, "no tokens, no pass"
    alone = replace(model, overlap=False)
    assert alone.prefill_layer(10, 0) == 1e-3 + 1e-4
    assert decode(encode(model), "x") == model


def test_each_pass_waits_for_the_weights() -> None:
    model = replace(LINK, weights=1e-2, pass_tokens=100)
    found = [model.prefill_layer(new, 0) for new in (0, 1, 100, 101, 250)]
    assert found == [0.0, 1e-2, 1e-2, 2e-2, 3e-2]
    one_thread = replace(model, overlap=False)
    assert one_thread.prefill_layer(250, 0) == pytest.approx(250 * 1e-5 + 3e-2)
    assert decode(encode(model), "x") == model


def test_a_history_of_several_passes_is_loaded() -> None:
    """It was refused: computing it seemed to need its weights once."""
    link = cost_model(host=1.3e-6, project=1e-6, prefill=1.3e-6)
    model, plan = replace(link, weights=92e-3), LayerPlan(0, 0, 46)
    one_pass = plan_restore(model, plan, 48_000, context=0, new=64)
    assert one_pass.choice is Choice.REFUSE
    chunked = replace(model, pass_tokens=16_384)
    found = plan_restore(chunked, plan, 48_000, context=0, new=64)
    assert found.choice is Choice.LOAD and found.recompute_layers == 0
    assert found.seconds < 46 * 3 * 92e-3


def test_recomputed_layers_have_their_weights_copied_before_others_are_loaded() -> None:
    model, plan = replace(LINK, weights=1e-2, pass_tokens=1000), LayerPlan(2, 0, 2)
    seconds = makespan(model.layer_times(SourceTier.HOST, 2000, new=10), plan)
    link = 2 * (2 + 1) * 1e-2 + 2 * (2e-3 + 1e-2)
    assert seconds == pytest.approx(link + 1e-2)


def test_weights_and_state_share_the_link() -> None:
    """A pass that restores a long history takes the time of both copies, not of the longer one."""
    model, plan = replace(LINK, weights=1e-3), LayerPlan(0, 0, 40)
    seconds = makespan(model.layer_times(SourceTier.HOST, 1000, new=10), plan)
    assert 40 * 2e-3 <= seconds <= 41 * 2e-3
    plain = LINK.layer_times(SourceTier.HOST, 1000)
    assert model.layer_times(SourceTier.HOST, 1000).copy_hidden == plain.copy_hidden + 1e-3
    one_thread = replace(model, overlap=False).layer_times(SourceTier.HOST, 1000)
    assert one_thread.copy_kv == plain.copy_kv


def test_what_is_seen_beside_weights_corrects_only_what_does_not_pass_the_link() -> None:
    model = replace(LINK, weights=1e-3)
    for _ in range(20):
        model.observe({Resource.PREFILL: 1e-4}, 1e-2)
        model.observe({Resource.DISK: 1e-4}, 1e-2)
    assert set(model.learned) == {Resource.DISK}
