"""Capacity search: the smallest measured size that reaches the target."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.tools.simulator.capacity import full_capacity, geometric_steps, smallest_reaching


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


def test_steps_grow_by_one_factor_and_end_at_the_bounds():
    steps = geometric_steps(1e9, 8e9, 4)
    assert steps == pytest.approx([1e9, 2e9, 4e9, 8e9])
    for low, high, count in ((0, 1, 3), (2, 1, 3), (1, 2, 1)):
        with pytest.raises(ValueError, match="low"):
            geometric_steps(low, high, count)


def test_full_capacity_is_the_papers():
    # AttentionStore 4.3.5: one hour at 1 session/s, 4K tokens of 0.78 MiB each.
    assert full_capacity(3600, 4096 * 819_200) == pytest.approx(12.08e12, rel=1e-3)
