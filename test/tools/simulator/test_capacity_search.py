"""Capacity search: the smallest measured size that reaches the target."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.tools.cli.capacity import _sizes
from sglang_hc.tools.simulator import buying
from sglang_hc.tools.simulator.capacity import smallest_reaching
from sglang_hc.tools.simulator.models import load_model
from sglang_hc.tools.simulator.run import Setup
from sglang_hc.tools.simulator.workloads import attentionstore
from support.examples import examples


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 1))
def test_the_first_size_that_reaches_the_target_is_found(rates, target):
    rates.sort()
    sizes = [float(i) for i in range(len(rates))]
    asked: list[float] = []

    def measure(size: float) -> float:
        asked.append(size)
        return rates[int(size)]

    point = smallest_reaching(target, sizes, measure)
    expected = next((i for i, rate in enumerate(rates) if rate >= target), None)
    assert (None if point is None else point.num_bytes) == expected
    assert len(asked) <= len(rates).bit_length()
    if point is not None:
        assert point.hit_rate >= target


@given(st.floats(1e6, 1e9), st.floats(1.0, 1e6))
def test_sizes_grow_by_at_most_the_root_of_two_and_end_at_the_bounds(low, times):
    sizes = _sizes(low, low * times)
    assert sizes[0] == low and sizes[-1] == low * times
    assert all(1.0 <= b / a <= 2**0.5 * (1 + 1e-9) for a, b in pairwise(sizes))


@settings(deadline=None, max_examples=examples(25))
@given(
    sessions=st.integers(1, 12),
    warmup=st.integers(0, 20),
    rate=st.sampled_from([0.1, 1.0, 100.0]),
    target=st.floats(0, 30) | st.just(None),
)
def test_tiers_are_enough_when_nine_of_ten_first_tokens_come_in_time(
    sessions, warmup, rate, target
):
    load = dataclasses.replace(attentionstore(sessions=sessions, rate=rate), warmup_turns=warmup)
    setup = Setup(load, load_model("llama-13b"), 1e10, 1e11)
    row = buying.served(setup, "kv")
    target = row.p90 if target is None else target
    assert buying.enough(setup, "kv", target) == (row if row.p90 <= target else None)


def test_what_cannot_be_enough_any_more_is_not_simulated_to_its_end(monkeypatch):
    load = attentionstore(sessions=40, rate=100.0)
    told = []

    def watched(setup, on_first):
        return simulate(setup, on_first=lambda ttft: (told.append(ttft), on_first(ttft)))

    simulate = buying.simulate
    monkeypatch.setattr(buying, "simulate", watched)
    setup = Setup(load, load_model("llama-13b"), 1e10, 1e11)
    assert buying.enough(setup, "kv", 1e-9) is None
    assert len(told) == pytest.approx((load.num_turns - load.warmup_turns) / 10, abs=1)
