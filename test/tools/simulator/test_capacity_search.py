"""Capacity search: the smallest measured size that reaches the target."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.tools.cli.capacity import _sizes
from sglang_hc.tools.simulator.capacity import smallest_reaching


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
