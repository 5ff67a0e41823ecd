"""`--hc-forms auto`: the layer plan for a measured machine, and one line that explains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_hc.forms import LayerPlan, StateShape
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.layer_plan import best_layer_plan, stored_bytes
from sglang_hc.policy.makespan import makespan

HISTORIES = (2048, 4096)
"""Tokens of the histories that a plan is made for: half of the conversations in HCache figure 3b
are longer than 2.5K tokens."""

NEW_TOKENS = 64
"""Tokens of the new prompt behind them."""


class AutoPlan(NamedTuple):
    """The plan, and why, for the log."""

    plan: LayerPlan
    explanation: str


def auto_plan(
    cost: CostModel,
    shape: StateShape,
    tiers: Sequence[SourceTier],
    *,
    allow_hidden: bool,
    allow_recompute: bool,
) -> AutoPlan:
    """The plan whose worst case over usual histories and `tiers` loses least (see layer_plan).

    At least one layer is stored: where recomputing everything is the fastest for usual histories,
    what is stored still serves longer ones, and each restoration decides for itself.
    """
    cases = [
        cost.layer_times(tier, history, new=NEW_TOKENS) for tier in tiers for history in HISTORIES
    ]
    hidden = allow_hidden and cost.project is not None
    plan = best_layer_plan(cases, shape, allow_hidden=hidden, allow_recompute=allow_recompute)
    if plan.recompute == plan.num_layers:
        plan = best_layer_plan(cases, shape, allow_hidden=hidden, allow_recompute=False)
    return AutoPlan(plan, "; ".join(_explain(cost, shape, plan, tier, hidden) for tier in tiers))


def _explain(
    cost: CostModel, shape: StateShape, plan: LayerPlan, tier: SourceTier, hidden: bool
) -> str:
    """Expected seconds of one restoration against the single forms."""
    history, layers = HISTORIES[0], plan.num_layers
    times = cost.layer_times(tier, history)
    others = {"KV only": LayerPlan(0, 0, layers), "recompute": LayerPlan(layers, 0, 0)}
    if hidden:
        others["hidden only"] = LayerPlan(0, layers, 0)
    rivals = ", ".join(f"{name} {_ms(makespan(times, way))}" for name, way in others.items())
    return (
        f"{history} tokens from {tier.value} in {_ms(makespan(times, plan))} ({rivals}), "
        f"{stored_bytes(plan, shape)} bytes a token"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
