"""What the span of a request is told; with OpenTelemetry's own SDK in stores/test_spans.py."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.restore_plan import Choice, Reason, RestorePlan
from sglang_hc.restore.timed_restorer import Timed
from sglang_hc.srt.tree.spans import Spans


class Request:
    """As SGLang's, traced or not; told: its span's attributes, until that is over."""

    def __init__(self, traced: bool) -> None:
        self.told: dict[str, Any] = {}
        context = SimpleNamespace(tracing_enable=traced, trace_set_thread_attrs=self.told.update)
        self.time_stats = SimpleNamespace(trace_ctx=context)


def plan(layers: int) -> RestorePlan:
    return RestorePlan(Choice.LOAD, Reason.AS_STORED, 1, layers)


@given(
    tiers=st.lists(st.sampled_from(SourceTier), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 5 * BLOCK_TOKENS), min_size=2, max_size=4, unique=True),
    seconds=st.floats(0.001, 10.0),
)
def test_parts_of_a_restoration_add_up(
    tiers: list[SourceTier], cuts: list[int], seconds: float
) -> None:
    """Each token is told of once, from where its block came; each part's pass takes its time."""
    path = [SimpleNamespace(source=tier) for tier in tiers]
    ends = sorted({min(cut, len(path) * BLOCK_TOKENS) for cut in cuts})
    spans, req, other = Spans(), Request(True), Request(False)
    parts = list(pairwise(ends))
    plans = [plan(layers) for layers in range(len(parts))]
    for (start, stop), part in zip(parts, plans, strict=True):
        spans.restored(req, path, part, start, stop)
        spans.restored(other, path, plan(9), start, stop)
        assert req.told["hc.recomputed_layers"] == part.recompute_layers
    of_token = [tiers[n // BLOCK_TOKENS] for start, stop in parts for n in range(start, stop)]
    for tier in SourceTier:
        assert req.told.get(f"hc.restored_tokens.{tier.value}", 0) == of_token.count(tier)
    for number, part in enumerate(plans, start=1):
        spans.timed(Timed(seconds, 1, [plan(0), part]))
        spans.timed(Timed(seconds, 1, [plan(0)]))
        assert abs(req.told["hc.restore_seconds"] - number * seconds) < 1e-6
    assert not other.told
