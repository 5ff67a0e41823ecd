"""HCache's figure 9 by request rate: first tokens, time between tokens and throughput, simulated.

    python -m benchmark.simulator.hcache_rates [--json FILE]

Nothing is measured. The simulated server runs ShareGPT4's rounds on the machines of `hcache`, with
its fitted host work: mixed passes, a batch for which the device has room, nothing reused on the
device, a restoration and then a prefill in each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmark.harness.modelled import json_option, publish, table
from benchmark.harness.report import Table
from benchmark.simulator.hcache_model import (
    HCACHE,
    IDEAL,
    KV,
    RE,
    TESTBED,
    WINDOW,
    System,
    busy,
    costs,
    fitted,
    reported,
    rounds,
)
from sglang_hc.forms import BlockLayout, LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.fit import Fit, StepFit
from sglang_hc.policy.makespan import makespan
from sglang_hc.policy.restore_plan import RestorePlan, plan_restore
from sglang_hc.tools.cli.plan import DEFAULT_CONTEXT
from sglang_hc.tools.datasheet import NO_HOST_WORK
from sglang_hc.tools.simulator.costs import GpuCosts, MeasuredMachine, Part
from sglang_hc.tools.simulator.engine import Engine, Event, Serving
from sglang_hc.tools.simulator.models import SimulatedModel
from sglang_hc.tools.simulator.tiers import TieredCache, TierSizes
from sglang_hc.tools.simulator.workloads import sharegpt4
from sglang_hc.tools.workloads.sessions import Workload

LOADS = (0.3, 0.6, 0.9, 1.5)
"""Requests over those that KV offload serves on a full device; the last one is an overload."""

SESSIONS = 300
BLOCKS = 1 << 20
"""Room for all state below the device."""


class PaperCosts(GpuCosts):
    """All that is stored is loaded, in the pass of its request; or, for the ideal, is there."""

    def __init__(self, system: System, arm: str) -> None:
        shape = system.shape
        plan = LayerPlan(0, 0, shape.num_layers)
        if arm == HCACHE:
            plan = reported(system, DEFAULT_CONTEXT).ways[HCACHE].plan
        layout = BlockLayout(plan, shape.state_shape())
        model = SimulatedModel(system.model, shape, layout, WINDOW, 1, NO_HOST_WORK)
        super().__init__(model, MeasuredMachine(with_steps(system), "modelled"))
        self._ideal = arm == IDEAL

    @property
    def can_restore_early(self) -> bool:
        return False

    def restored(self, tokens: int, context: int, new: int, wait: float = 0.0) -> RestorePlan:
        return plan_restore(
            self.cost, self.plan, tokens, context=context, new=new, allow_recompute=False
        )

    def pass_seconds(
        self, parts: Sequence[Part], rows: int = 0, context: float = 0.0, captures: bool = False
    ) -> float:
        prompts = [Part(part.new, part.context + part.restored) for part in parts]
        seconds = super().pass_seconds(prompts, rows, context)
        for part in parts:
            if part.restored and not self._ideal:
                times = self.cost.layer_times(SourceTier.HOST, part.restored, context=part.context)
                seconds += makespan(times, self.plan)
        return seconds


def with_steps(system: System) -> CostModel:
    """The costs of the restorations, and a decode step by the same rates: each layer reads its
    weights and the state of all contexts, and has the host work."""
    cost, memory = costs(system), system.card.memory_bandwidth * system.gpus
    step = Fit(0.0, cost.prefill.per_token, floor=cost.prefill.floor)
    return replace(
        cost,
        step=StepFit(step, system.shape.state_shape().kv_bytes / memory),
        passes=cost.prefill,
    )


@dataclass(frozen=True)
class Served:
    """Of a run: means in seconds, and rounds a second in the later half of the arrivals."""

    first_token: float
    between_tokens: float
    rate: float


def room(system: System) -> int:
    """Requests for which the device has memory."""
    tokens = system.free / (system.shape.num_layers * system.shape.state_shape().kv_bytes)
    return max(1, int(tokens / fmean(one.context + one.question + one.answer for one in rounds())))


def served(system: System, arm: str, rate: float) -> Served:
    """A run at so many requests a second."""
    turns = sharegpt4(sessions=SESSIONS).num_turns / SESSIONS
    load = replace(sharegpt4(sessions=SESSIONS, rate=rate / turns), warmup_turns=0)
    below = 0 if arm == RE else BLOCKS
    prices = PaperCosts(system, arm)
    cache = TieredCache(TierSizes(0, below, 0), prices, policy="lru", prefetch="off")
    engine = Engine(load, cache, prices, Serving(room(system), mixed=True))
    measures = engine.run()
    last = max(session.arrival for session in load.sessions)
    ends = [event.time for event in engine.events if event.kind == "finish"]
    inside = sum(last / 2 <= end < last for end in ends)
    apart = between_tokens(engine.events, load)
    return Served(fmean(measures.service_ttft), apart, 2 * inside / last)


def between_tokens(events: Sequence[Event], load: Workload) -> float:
    """Mean seconds between two tokens of an answer."""
    answers = [iter(session.turns) for session in load.sessions]
    first: dict[int, float] = {}
    found = []
    for event in events:
        if event.kind == "first":
            first[event.session] = event.time
        elif event.kind == "finish":
            tokens = next(answers[event.session]).answer.length
            if tokens > 1:
                found.append((event.time - first[event.session]) / (tokens - 1))
    return fmean(found)


def figure_9() -> Table:
    """A row for each machine and load."""
    rows = []
    for system in map(fitted, TESTBED):
        most = 1 / busy(system, KV)
        for load in LOADS:
            found = {arm: served(system, arm, load * most) for arm in (IDEAL, HCACHE, KV, RE)}
            best = found[HCACHE]
            milliseconds = (f"{1e3 * found[arm].first_token:.0f}" for arm in (HCACHE, KV, RE))
            rows.append(
                [
                    system.model,
                    f"{load * most:.2f}",
                    *milliseconds,
                    *(f"{found[arm].first_token / best.first_token:.2f}" for arm in (KV, RE)),
                    f"{best.between_tokens / found[IDEAL].between_tokens:.2f}",
                    f"{best.rate / found[KV].rate:.2f}",
                ]
            )
    paper = ["paper", "", "", "", "", "1.27 to 1.90", "2.21 to 3.57", "up to 1.04", "up to 1.11"]
    columns = ("figure 9", "requests/s", "TTFT ms: HCache", "KV", "recompute", "over KV",
               "over recompute", "TBT over ideal", "served over KV")  # fmt: skip
    return table("figure-9-rates", columns, [*rows, paper])


def main(words: Sequence[str] | None = None) -> int:
    path = json_option(words, __doc__)
    publish("hcache_rates", [figure_9()], path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
