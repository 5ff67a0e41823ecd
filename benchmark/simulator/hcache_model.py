"""HCache's machines, models and loads (section 6): what restorations and first tokens take."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

from benchmark.throughput.paper import opt_config
from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.layer_plan import plan_for
from sglang_hc.policy.makespan import LayerTimes, makespan
from sglang_hc.tools.cli.plan import DEFAULT_CONTEXT, Report, report_of
from sglang_hc.tools.datasheet import Hardware, Rates, load_hardware, modelled_costs
from sglang_hc.tools.model_shape import ModelShape
from sglang_hc.tools.simulator.workloads import l_eval, sharegpt4
from sglang_hc.tools.workloads.l_eval import ContextTask
from sglang_hc.tools.workloads.sessions import Said

SSD = 6.9e9
HOST_WORK = 1.4e-3
WINDOW = 16384
GPU_TOKENS = 48_000
DOCUMENTS = 41

RE, KV, HIDDEN, HCACHE, IDEAL = "recompute", "kv", "hidden", "plan", "ideal"
"""Arms: all but the last by the names of the plan's report."""

_LLAMA = {"model_type": "llama", "torch_dtype": "float16", "vocab_size": 32000}
CONFIGS: dict[str, dict[str, Any]] = {
    "7B": _LLAMA | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                    "intermediate_size": 11008},
    "13B": _LLAMA | {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
                     "intermediate_size": 13824},
    "30B": opt_config("30B"),
}  # fmt: skip
"""Llama 2 and OPT."""


@dataclass(frozen=True)
class System:
    """A model on `gpus` of one kind. ssds: of each GPU; 0 where state is in host memory. work:
    seconds of host work for each layer and pass."""

    model: str
    gpu: str = "A100-40G"
    gpus: int = 1
    ssds: int = 4
    work: float = 0.0

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(CONFIGS[self.model])

    @property
    def card(self) -> Hardware:
        return load_hardware(self.gpu)

    @property
    def free(self) -> float:
        """Bytes of device memory beside the weights."""
        weights = self.shape.num_layers * self.shape.stored_params + self.shape.embedding_params
        return self.gpus * self.card.memory_gb.value * 1e9 - 2 * weights

    @property
    def link(self) -> float:
        """Bytes/s onto all GPUs."""
        each = self.card.link_gbps.value * 1e9
        return self.gpus * (min(each, self.ssds * SSD) if self.ssds else each)

    def seconds(self, plan: LayerPlan, context: int) -> float:
        """Of a restoration alone."""
        return makespan(costs(self).layer_times(SourceTier.HOST, context), plan)

    def prefill(self, new: int, context: int) -> float:
        return self.shape.num_layers * costs(self).prefill_layer(new, context)

    def first_token(self, arm: str, context: int, new: int) -> float:
        """A restoration by the deployment's schedule, and a prefill after it (section 5)."""
        if arm == RE:
            return self.prefill(context + new, 0)
        ideal = self.prefill(new, context)
        if arm == IDEAL:
            return ideal
        return ideal + self.seconds(reported(self, DEFAULT_CONTEXT).ways[arm].plan, context)


TESTBED = (System("7B"), System("13B"), System("30B", gpus=4, ssds=1))
"""Four A100 with four SSDs, which are all at the one GPU of the Llamas."""

THIRTEEN = replace(TESTBED[1], ssds=1)
"""Figure 13's."""


@cache
def costs(system: System) -> CostModel:
    card, gpus = system.card, system.gpus
    rates = Rates(card.flops * gpus, card.memory_bandwidth * gpus, system.link, None)
    cost = modelled_costs(str(system), system.shape, rates)
    floor = cost.prefill.floor + system.work
    return replace(cost, prefill=replace(cost.prefill, floor=floor))


@cache
def reported(system: System, context: int) -> Report:
    """What `sglang-hc plan --new-tokens 0` says."""
    return report_of(costs(system), system.shape, SourceTier.HOST, context, 0)


def gain(system: System, over: str, context: int) -> float:
    """Speed of HCache's restoration over another's (section 6.2)."""
    ways = reported(system, context).ways
    return ways[over].restore / ways[HCACHE].restore


def fitted(system: System) -> System:
    return replace(system, work=HOST_WORK)


def by_formula(system: System, balance: float) -> LayerPlan:
    """The schedule of section 4.1.2 where hidden states balance at so many bytes/s. A recomputed
    layer takes six projections (section 3.2)."""
    layers, copy = system.shape.num_layers, balance / system.link
    if copy < 1:
        hidden = math.ceil(layers * 2 * copy / (1 + copy))
        return LayerPlan(0, hidden, layers - hidden)
    hidden = math.ceil(layers * 6 / (5 + copy))
    return LayerPlan(layers - hidden, hidden, 0)


def without_hidden(system: System, context: int) -> float:
    """Seconds of the best mixture of recomputed layers and KV (section 6.3.1's naive hybrid)."""
    plan = plan_for(
        costs(system), system.shape.state_shape(), [(SourceTier.HOST, context)], new=0,
        allow_hidden=False, allow_recompute=True,
    )  # fmt: skip
    return system.seconds(plan, context)


def by_tokens(system: System, context: int, hidden: int, tile: int = 1) -> float:
    """Seconds when the first `hidden` tokens of each layer are hidden states and the others are
    recomputed (section 6.3.2). Products take as long as those of whole tiles of tokens."""

    def tiles(tokens: int) -> int:
        return tile * math.ceil(tokens / tile)

    cost = costs(system)
    work = cost.project_kv(tiles(hidden)) + cost.prefill_layer(tiles(context - hidden), hidden)
    times = LayerTimes(cost.copy_hidden(SourceTier.HOST, hidden), 0.0, work, 0.0)
    return makespan(times, LayerPlan(0, system.shape.num_layers, 0))


@cache
def rounds() -> tuple[ContextTask, ...]:
    """ShareGPT4's rounds that have a history, which is cut at the window."""
    found = []
    for session in sharegpt4(sessions=500).sessions:
        context = 0
        for turn in session.turns:
            if context:
                kept = min(context, WINDOW)
                found.append(ContextTask(kept, turn.new_tokens, turn.answer.length))
            context += turn.new_tokens + turn.answer.length
    return tuple(found)


def mean_first_token(system: System, arm: str) -> float:
    """Of ShareGPT4's rounds, seconds."""
    return fmean(system.first_token(arm, int(one[0]), int(one[1])) for one in rounds())


def busy(system: System, arm: str) -> float:
    """Mean seconds of a round on a full device where nothing runs beside a restoration: first
    token, and its part of the decode steps of the batch that the device has room for."""
    shape = system.shape
    room = system.free / (shape.num_layers * shape.state_shape().kv_bytes)
    batch = room / fmean(one.context + one.question + one.answer / 2 for one in rounds())
    step = shape.num_layers * costs(system).prefill.floor
    step += system.free / (system.gpus * system.card.memory_bandwidth)
    return fmean(one.answer for one in rounds()) * step / batch + mean_first_token(system, arm)


@cache
def requests(skew: float) -> tuple[tuple[ContextTask, bool], ...]:
    """L-Eval's requests drawn with this Zipf skew, and whether the device still has the document
    (section 6.4)."""
    kept: dict[Said, int] = {}
    found = []
    for session in l_eval(sessions=3000, alpha=skew, contexts=DOCUMENTS).sessions:
        (turn,) = session.turns
        document, question = turn.said
        hit = kept.pop(document, None) is not None
        kept[document] = document.length
        while sum(kept.values()) > GPU_TOKENS:
            kept.pop(next(iter(kept)))
        found.append((ContextTask(document.length, question.length, turn.answer.length), hit))
    return tuple(found)


def mean_of_requests(system: System, arm: str, skew: float) -> float:
    """Of such requests, seconds to the first token."""
    return fmean(
        system.first_token(IDEAL if hit else arm, int(one.context), int(one.question))
        for one, hit in requests(skew)
    )
