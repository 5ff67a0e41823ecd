"""KV layers between HIDDEN layers: what it is for, by simulation with few staging frames."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.copy_order import kv_per_hidden, merged
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.makespan import makespan
from support.profiles import cost_model

TOKENS = 1000


def whole(layers: int, name: str) -> list[tuple[float, str]]:
    return [(1.0, name) for _ in range(layers)]


def simulate(order: list[str], copy: dict[str, float], project: float, frames: int) -> float:
    """End of a restoration of whole layers whose copies wait for a free frame.

    A frame is free again when its layer was computed; KV layers take no time there.
    """
    link = compute = 0.0
    freed = deque([0.0] * frames)
    for form in order:
        link = max(link, freed.popleft()) + copy[form]
        compute = max(compute, link) + (project if form == "hidden" else 0.0)
        freed.append(compute)
    return compute


@given(
    st.lists(st.floats(0.01, 1), max_size=20),
    st.lists(st.floats(0.01, 1), max_size=20),
    st.floats(0, 20),
)
def test_both_keep_their_order_and_nothing_is_lost(first, second, rate) -> None:
    hidden = [(share, ("hidden", i)) for i, share in enumerate(first)]
    kv = [(share, ("kv", i)) for i, share in enumerate(second)]
    found = list(merged(hidden, kv, rate))
    assert [item for item in found if item[0] == "hidden"] == [item for _, item in hidden]
    assert [item for item in found if item[0] == "kv"] == [item for _, item in kv]
    credit = 0.0
    left = len(first)
    for form, index in found:
        if form == "hidden":
            credit += rate * first[index]
            left -= 1
        elif left:
            credit -= second[index]
            assert credit >= -1e-9, "more than the link has time for"


def test_without_spare_time_kv_comes_last() -> None:
    order = list(merged(whole(3, "hidden"), whole(2, "kv"), 0.0))
    assert order == ["hidden"] * 3 + ["kv"] * 2
    assert list(merged([], whole(2, "kv"), 5.0)) == ["kv", "kv"]


@pytest.mark.parametrize(
    ("costs", "rate"),
    [
        ({"host": 4e-6, "project": 6e-6}, 1.0),  # copies of 2 and 4 ms, 6 ms to project
        ({"host": 4e-6, "project": 1e-6}, 0.0),  # the link has no time to spare
        ({"host": 4e-6, "project": 6e-6, "overlap": False}, 0.0),
        ({"host": 0.0, "project": 6e-6}, 0.0),
    ],
)
def test_spare_time_of_the_link_in_kv_layers(costs: dict, rate: float) -> None:
    assert kv_per_hidden(cost_model(**costs), TOKENS) == pytest.approx(rate)


@settings(max_examples=200)
@given(st.integers(1, 30), st.integers(0, 30), st.floats(1e-7, 1e-5), st.floats(1e-7, 1e-5))
def test_with_few_frames_the_end_is_the_modelled_one(hidden, kv, host, project) -> None:
    """The model knows no frames. With this order four are enough for it, but for a layer or two:
    those that are held while one layer is projected, and those beside them."""
    cost = cost_model(host=host, project=project)
    times = cost.layer_times(SourceTier.HOST, TOKENS)
    copy = {"hidden": times.copy_hidden, "kv": times.copy_kv}
    model = makespan(times, LayerPlan(0, hidden, kv))
    rate = kv_per_hidden(cost, TOKENS)
    assume(rate <= 2)
    order = list(merged(whole(hidden, "hidden"), whole(kv, "kv"), rate))
    end = simulate(order, copy, times.project, frames=4)
    assert end <= model + 2 * max(times.copy_kv, times.project)


def test_hidden_layers_first_leave_the_link_idle_when_frames_are_few() -> None:
    """The control: the other order loses what the KV layers could have overlapped with."""
    cost = cost_model(host=4e-6, project=6e-6)
    times = cost.layer_times(SourceTier.HOST, TOKENS)
    copy = {"hidden": times.copy_hidden, "kv": times.copy_kv}
    rate = kv_per_hidden(cost, TOKENS)
    first = [*["hidden"] * 20, *["kv"] * 20]
    between = list(merged(whole(20, "hidden"), whole(20, "kv"), rate))
    model = makespan(times, LayerPlan(0, 20, 20))
    assert simulate(first, copy, times.project, frames=4) > 1.4 * model
    assert simulate(between, copy, times.project, frames=4) < 1.1 * model
