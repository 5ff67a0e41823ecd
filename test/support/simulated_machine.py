"""A machine whose true costs are known: what is decided there, and what is seen of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.correction import Resource
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.restore_plan import Choice, RestorePlan

Noise = Callable[[], float]
"""What the next observed time is multiplied by."""


def scaled(cost: CostModel, factors: dict[Resource, float]) -> CostModel:
    """`cost` with each resource slower by its factor."""

    def line(fit: Fit, *resources: Resource) -> Fit:
        factor = 1.0
        for resource in resources:
            factor *= factors.get(resource, 1.0)
        return replace(fit, fixed=fit.fixed * factor, per_token=fit.per_token * factor)

    host, prefill = cost.copies[SourceTier.HOST], factors.get(Resource.PREFILL, 1.0)
    assert host.hidden is not None and cost.project is not None
    copies = TierCopy(line(host.kv, Resource.KV_COPY), line(host.hidden, Resource.HIDDEN_COPY))
    return replace(
        cost,
        copies={SourceTier.HOST: copies},
        project=line(cost.project, Resource.PROJECTION),
        prefill=Fit(0.0, cost.prefill.per_token * prefill, cost.prefill.per_pair * prefill),
    )


class SimulatedMachine:
    """A server by a profile, on a machine that is as `true` says; one request after the other."""

    def __init__(
        self, profile: CostModel, true: CostModel, plan: LayerPlan, noise: Noise,
        recompute: bool = True,
    ) -> None:  # fmt: skip
        self.costs = replace(profile)
        self._measured = profile
        self.counters: Counter[str] = Counter()
        self.now = 0.0
        self._plan = plan
        self.true = true
        self._noise = noise
        self._planner = RestorePlanner(self.costs, plan, recompute, self.counters, lambda: self.now)

    def serve(self, history: int, new: int) -> RestorePlan:
        """A request with `history` tokens in host memory. The time that it takes is observed."""
        self.now += 1e6  # the link is idle again
        plan = self._planner.choose(history, 0, new)
        if plan.tokens:
            self._planner.take(plan)
            self._observe_copies(plan)
        else:
            self._planner.refuse(plan.reason)
        self._see(Resource.PREFILL, lambda cost: cost.prefill_layer(64, 0))  # somebody else's
        return plan

    def _observe_copies(self, plan: RestorePlan) -> None:
        kv = min(self._plan.kv, self._plan.num_layers - plan.recompute_layers)
        hidden = self._plan.num_layers - plan.recompute_layers - kv
        host, tokens = SourceTier.HOST, plan.tokens
        if kv:
            self._see(Resource.KV_COPY, lambda cost: kv * cost.copy_kv(host, tokens))
        if hidden:
            self._see(Resource.HIDDEN_COPY, lambda cost: hidden * cost.copy_hidden(host, tokens))
            self._see(Resource.PROJECTION, lambda cost: hidden * cost.project_kv(tokens))

    def _see(self, resource: Resource, seconds: Callable[[CostModel], float]) -> None:
        observed = seconds(self.true) * self._noise()
        self.costs.observe({resource: seconds(self._measured)}, observed)


def is_try(plan: RestorePlan) -> bool:
    return plan.choice is Choice.TRY
