"""What a restoration is weighed with where layers have windows: the bytes that come back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import (
    BLOCK_TOKENS,
    BlockLayout,
    EndLayout,
    LayerPlan,
    StateShape,
    WindowLayers,
)
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.srt.start.build_ends import end_tokens, of_full_layers

BYTE_SECONDS = 1e-10


@given(
    full=st.integers(1, 8), windows=st.integers(1, 40), reach=st.integers(1, 9000),
    row=st.integers(1, 64), window_row=st.integers(1, 64), measured=st.integers(1, 64),
    tokens=st.integers(1, 500),
)  # fmt: skip
def test_copies_take_what_their_bytes_take(
    full: int, windows: int, reach: int, row: int, window_row: int, measured: int, tokens: int
) -> None:
    """Whichever layer was measured. row, window_row, measured: of K and of V, in 64 bytes."""
    parts = (64 * row,) * 2, (64 * window_row,) * 2
    layers = tuple(range(full, full + windows))
    others, plan = WindowLayers(layers, reach, parts[1]), LayerPlan(0, 0, full)
    ends = EndLayout(others)
    layout = BlockLayout(plan, StateShape(full, 0, parts[0], "float32"), ends=ends)
    copy = TierCopy(Fit(0.0, BYTE_SECONDS * 128 * measured))
    costs = CostModel("test", "measured", {SourceTier.HOST: copy}, Fit(0.0, 1.0, 1e-3))
    made = of_full_layers(costs, full, others, row / measured)
    planner = RestorePlanner(made, plan, False, Counter(), end_tokens=end_tokens(layout))
    chosen = planner.choose(tokens * BLOCK_TOKENS, 0, 1)
    copied = tokens * BLOCK_TOKENS * full * 128 * row + windows * reach * 128 * window_row
    assert chosen.copy_seconds == pytest.approx(copied * BYTE_SECONDS, rel=1e-3)


@given(st.integers(1, 500), st.integers(0, 500))
def test_windows_attend_to_their_tokens_and_cost_the_rest(new: int, context: int) -> None:
    prefill = Fit(fixed=0.5, per_token=2.0, per_pair=3.0, per_context=0.1)
    costs = CostModel("test", "measured", {SourceTier.HOST: TierCopy(Fit(0.0, 1.0))}, prefill)
    made = of_full_layers(costs, 2, WindowLayers(tuple(range(6)), 100, (4, 4)), 1.0)
    assert made is not None and made.copies == costs.copies
    near = replace(prefill, window=100, windowed=1.0)
    whole = 2 * prefill.seconds(new, context) + 6 * near.seconds(new, context)
    assert 2 * made.prefill_layer(new, context) == pytest.approx(whole)


def test_nothing_is_made_of_nothing() -> None:
    assert of_full_layers(None, 2, WindowLayers((0,), 100, (4, 4)), 1.0) is None
    layout = BlockLayout(LayerPlan(0, 0, 2), StateShape(2, 0, (64, 64), "float32"))
    assert end_tokens(layout) == 0
