"""AttentionStore's read-buffer formula."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.copy_order import early_bytes
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit

TOKEN = 8192
"""Bytes of a token in one layer of KV."""


def machine(load: float, prefill: float, project: float = 0.0) -> CostModel:
    """Seconds per token and layer, nothing fixed."""
    copies = {SourceTier.HOST: TierCopy(kv=Fit(0.0, load), hidden=Fit(0.0, load / 2))}
    return CostModel("drawn", "measured", copies, Fit(0.0, prefill, 0.0), Fit(0.0, project))


rates = st.floats(1e-8, 1e-3)


@given(
    load=rates, prefill=rates, layers=st.integers(1, 40), history=st.integers(1, 20_000),
    new=st.integers(1, 2000),
)  # fmt: skip
def test_it_is_the_papers_formula_for_a_kv_plan(
    load: float, prefill: float, layers: int, history: int, new: int
) -> None:
    size = layers * history * TOKEN
    bandwidth = TOKEN / load
    paper = bandwidth * (layers * load * history - layers * prefill * new)
    bytes_ = early_bytes(
        machine(load, prefill), LayerPlan(0, 0, layers), size, history=history, context=0, new=new
    )
    assert abs(bytes_ - min(size, max(0.0, paper))) <= 1 + 1e-6 * size


@given(
    load=rates, prefill=rates, project=rates, hidden=st.integers(0, 4), kv=st.integers(0, 4),
    history=st.integers(1, 20_000), new=st.integers(1, 2000),
)  # fmt: skip
def test_never_more_than_the_history_and_less_with_more_to_compute(
    load: float, prefill: float, project: float, hidden: int, kv: int, history: int, new: int
) -> None:
    plan = LayerPlan(0, hidden, kv)
    size = history * (hidden + 2 * kv) * TOKEN // 2

    def of(new: int) -> int:
        return early_bytes(
            machine(load, prefill, project), plan, size, history=history, context=0, new=new
        )

    assert 0 <= of(2 * new) <= of(new) <= size


def test_a_history_that_the_new_tokens_hide_needs_nothing_early() -> None:
    cost = machine(load=1e-6, prefill=1e-4)
    assert early_bytes(cost, LayerPlan(0, 0, 4), 10**6, history=100, context=0, new=50) == 0
