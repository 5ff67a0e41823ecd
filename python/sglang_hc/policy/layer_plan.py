"""Which form each layer is kept in: exact search over the three counts (HCache section 4.1.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_hc.forms import LayerPlan, StateShape
from sglang_hc.policy.makespan import LayerTimes, makespan

_TIE = 1e-3
"""Makespans closer than this are the same: no cost model is exact to a thousandth, and then the
smaller state, and after it the plan with less to recompute, is worth more than the difference."""

_ROUNDING = 1e-12


def best_layer_plan(
    scenarios: LayerTimes | Sequence[LayerTimes],
    shape: StateShape,
    *,
    allow_hidden: bool = True,
    allow_recompute: bool = True,
) -> LayerPlan:
    """The plan with the shortest restoration among those that do not harm the first token.

    With `new` > 0 in a scenario, only plans are considered whose time through the new tokens is not
    above that of recompute only, hidden only and KV only: work that a restoration alone hides
    behind its copies competes with the new tokens in a real request. Of plans within a thousandth
    of the best the one that stores least is taken, as long as it is no slower than the best single
    form.

    scenarios: per-layer times of one restoration, or of several that one plan must serve (tiers,
    history lengths): the state is stored once, whatever tier it is read from later. With several,
    the plan whose worst loss against each scenario's own best is smallest.
    allow_hidden, allow_recompute: False where the server cannot do that form for the model. KV is
    always possible. HIDDEN is also left out when a scenario's projection time is infinite.
    Raises ValueError without a scenario.
    """
    cases = [scenarios] if isinstance(scenarios, LayerTimes) else list(scenarios)
    if not cases:
        raise ValueError("a layer plan needs at least one scenario")
    hidden = allow_hidden and all(math.isfinite(case.project) for case in cases)
    plans = list(_plans(shape.num_layers, hidden, allow_recompute))
    harm = _worst_ratios(plans, [_Case(case, [p for p in plans if _single(p)]) for case in cases])
    limit = max(1.0, min(harm)) * (1 + _ROUNDING)
    harmless = [plan for plan, value in zip(plans, harm, strict=True) if value <= limit]
    alone = [case._replace(new=0.0) for case in cases]
    loss = _worst_ratios(harmless, [_Case(case, plans) for case in alone])
    limit = min(loss) * (1 + _TIE)
    limit = min([limit, *(v for p, v in zip(harmless, loss, strict=True) if _single(p))])
    close = [plan for plan, value in zip(harmless, loss, strict=True) if value <= limit]
    return min(close, key=lambda plan: (stored_bytes(plan, shape), plan.recompute, plan.hidden))


def stored_bytes(plan: LayerPlan, shape: StateShape) -> int:
    """Bytes that one token occupies off the device under this plan, padding of chunks excluded."""
    return plan.hidden * shape.hidden_bytes + plan.kv * shape.kv_bytes


@dataclass(frozen=True)
class _Case:
    """A scenario and the plans whose best makespan is the measure of the others."""

    times: LayerTimes
    rivals: Sequence[LayerPlan]


def _worst_ratios(plans: Sequence[LayerPlan], cases: Sequence[_Case]) -> list[float]:
    """Per plan, its makespan over the rivals' best, in the scenario where that is worst."""
    worst = [0.0] * len(plans)
    for case in cases:
        best = min(makespan(case.times, plan) for plan in case.rivals)
        for index, plan in enumerate(plans):
            seconds = makespan(case.times, plan)
            # Nothing to do at all is best done by every plan that takes no time either.
            ratio = seconds / best if best > 0 else 1.0 if seconds == 0 else math.inf
            worst[index] = max(worst[index], ratio)
    return worst


def _single(plan: LayerPlan) -> bool:
    return plan.num_layers in (plan.recompute, plan.hidden, plan.kv)


def _plans(layers: int, hidden: bool, recompute: bool) -> Iterator[LayerPlan]:
    for recomputed in range(layers + 1 if recompute else 1):
        rest = layers - recomputed
        for as_hidden in range(rest + 1 if hidden else 1):
            yield LayerPlan(recomputed, as_hidden, rest - as_hidden)
