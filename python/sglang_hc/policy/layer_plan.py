"""Which form each layer is kept in: exact search over the three counts (HCache section 4.1.2).

`auto_plan` is what `--hc-forms auto` does on a measured machine, with one line that explains it;
`explicit_plan` what other values of the flag say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from sglang_hc.forms import LayerPlan, PlanError, StateShape
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.makespan import LayerTimes, makespan
from sglang_hc.policy.meeting import best_split, from_below

HISTORIES = (2048, 4096)
"""Tokens of the histories that a plan is made for: half of the conversations in HCache figure 3b
are longer than 2.5K tokens."""

NEW_TOKENS = 64
"""Tokens of the new prompt behind them."""

_TIE = 1e-3
"""Makespans closer than this are the same: no cost model is exact to a thousandth, and then the
smaller state, and after it the plan with less to recompute, is worth more than the difference."""

KEPT = 1.15
"""A plan that was chosen before is kept while no usual history takes longer with it than this many
times what it takes with the best one: what is stored under another plan is lost."""

_ROUNDING = 1e-12


def explicit_plan(forms: str, num_layers: int) -> LayerPlan:
    """The plan `--hc-forms` names. Raises PlanError unless a model of `num_layers` can use it."""
    try:
        plan = LayerPlan.parse(forms, num_layers)
    except PlanError as error:
        raise PlanError(f"--hc-forms: {error}") from None
    if plan.recompute == num_layers:
        raise PlanError(
            f"--hc-forms {forms} keeps nothing; add --hc-disable to serve without the tiers"
        )
    return plan


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
    harm = _worst_ratios(plans, cases, [plan for plan in plans if _single(plan)])
    limit = max(1.0, min(harm)) * (1 + _ROUNDING)
    harmless = [plan for plan, value in zip(plans, harm, strict=True) if value <= limit]
    loss = _worst_ratios(harmless, [case._replace(new=0.0) for case in cases], plans)
    limit = min(loss) * (1 + _TIE)
    limit = min([limit, *(v for p, v in zip(harmless, loss, strict=True) if _single(p))])
    close = [plan for plan, value in zip(harmless, loss, strict=True) if value <= limit]
    return min(close, key=lambda plan: (stored_bytes(plan, shape), plan.recompute, plan.hidden))


def stored_bytes(plan: LayerPlan, shape: StateShape) -> int:
    """Bytes that one token occupies off the device under this plan, padding of chunks excluded."""
    return plan.hidden * shape.hidden_bytes + plan.kv * shape.kv_bytes


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
    """The plan whose worst case over usual histories and `tiers` loses least (see
    `best_layer_plan`).

    The plan that an earlier start chose (`CostModel.plan`) is kept while it is good (KEPT). At
    least one layer is stored: where recomputing everything is the fastest for usual histories, what
    is stored still serves longer ones, and each restoration decides for itself.
    """
    cases = [(tier, history) for tier in tiers for history in HISTORIES]
    hidden = allow_hidden and cost.project is not None
    plan = plan_for(cost, shape, cases, allow_hidden=hidden, allow_recompute=allow_recompute)
    if plan.recompute == plan.num_layers:
        plan = plan_for(cost, shape, cases, allow_hidden=hidden, allow_recompute=False)
    before = cost.plan
    if before is not None and before.num_layers == plan.num_layers:
        can = (hidden or not before.hidden) and (allow_recompute or not before.recompute)
        if can and _is_kept(cost, before, plan, cases):
            plan = before
    return AutoPlan(plan, "; ".join(_explain(cost, shape, plan, tier, hidden) for tier in tiers))


def plan_for(
    cost: CostModel,
    shape: StateShape,
    cases: Sequence[tuple[SourceTier, int]],
    *,
    new: int = NEW_TOKENS,
    allow_hidden: bool,
    allow_recompute: bool,
) -> LayerPlan:
    """The layer plan for histories of so many tokens in these tiers, `new` tokens behind each.

    Where all are in host memory that is `best_layer_plan`'s. What lies lower is computed from its
    front while its end is read, which no pipeline of layers describes. Then the candidates are the
    plans that suit host memory, all cases as pipelines, and the single forms. The one whose worst
    loss against each case's best candidate is smallest wins, on a tie the smaller state.
    """

    def pipelined(tiers: Iterable[tuple[SourceTier, int]]) -> LayerPlan:
        times = [cost.layer_times(tier, tokens, new=new) for tier, tokens in tiers]
        return best_layer_plan(
            times, shape, allow_hidden=allow_hidden, allow_recompute=allow_recompute
        )

    if all(tier is SourceTier.HOST for tier, _ in cases):
        return pipelined(cases)
    plans = [pipelined(cases), pipelined((SourceTier.HOST, tokens) for _, tokens in cases)]
    plans.append(LayerPlan(0, 0, shape.num_layers))
    if allow_hidden:
        plans.append(LayerPlan(0, shape.num_layers, 0))
    worst = {plan: 1.0 for plan in sorted(plans, key=lambda plan: stored_bytes(plan, shape))}
    for tier, tokens in cases:
        seconds = {plan: served_seconds(cost, plan, tier, tokens, new) for plan in worst}
        best = min(seconds.values())
        if best > 0:
            worst = {plan: max(worst[plan], seconds[plan] / best) for plan in worst}
    return min(worst, key=worst.__getitem__)


def served_seconds(
    cost: CostModel, plan: LayerPlan, tier: SourceTier, tokens: int, new: int
) -> float:
    """Until `new` tokens are through the last layer behind a history in this tier."""
    if tier is SourceTier.HOST:
        return makespan(cost.layer_times(tier, tokens, new=new), plan)
    return best_split(cost, plan, from_below(tier, tokens, new)).seconds


def _is_kept(
    cost: CostModel, before: LayerPlan, best: LayerPlan, cases: Sequence[tuple[SourceTier, int]]
) -> bool:
    def seconds(plan: LayerPlan, case: tuple[SourceTier, int]) -> float:
        return served_seconds(cost, plan, *case, NEW_TOKENS)

    return all(seconds(before, case) <= KEPT * seconds(best, case) for case in cases)


def _explain(
    cost: CostModel, shape: StateShape, plan: LayerPlan, tier: SourceTier, hidden: bool
) -> str:
    """Expected seconds of one restoration against the single forms."""
    history, layers = HISTORIES[0], plan.num_layers
    others = {"KV only": LayerPlan(0, 0, layers), "recompute": LayerPlan(layers, 0, 0)}
    if hidden:
        others["hidden only"] = LayerPlan(0, layers, 0)

    def shown(way: LayerPlan) -> str:
        return f"{1e3 * served_seconds(cost, way, tier, history, 0):.3g} ms"

    rivals = ", ".join(f"{name} {shown(way)}" for name, way in others.items())
    return (
        f"{history} tokens from {tier.value} in {shown(plan)} ({rivals}), "
        f"{stored_bytes(plan, shape)} bytes a token"
    )


def _worst_ratios(
    plans: Sequence[LayerPlan], cases: Sequence[LayerTimes], rivals: Sequence[LayerPlan]
) -> list[float]:
    """Per plan, its makespan over the rivals' best, in the scenario where that is worst."""
    best = [min(makespan(case, rival) for rival in rivals) for case in cases]

    def ratio(plan: LayerPlan, case: LayerTimes, least: float) -> float:
        seconds = makespan(case, plan)
        if least > 0:
            return seconds / least
        return 1.0 if seconds == 0 else math.inf  # who takes no time either is as good

    return [max(map(partial(ratio, plan), cases, best)) for plan in plans]


def _single(plan: LayerPlan) -> bool:
    return plan.num_layers in (plan.recompute, plan.hidden, plan.kv)


def _plans(layers: int, hidden: bool, recompute: bool) -> Iterator[LayerPlan]:
    for recomputed in range(layers + 1 if recompute else 1):
        rest = layers - recomputed
        for as_hidden in range(rest + 1 if hidden else 1):
            yield LayerPlan(recomputed, as_hidden, rest - as_hidden)
