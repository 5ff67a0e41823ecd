"""What is decided when the model is loaded: costs, layer plan, self-check, taps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sglang_hc.config import ConfigError, HcConfig
from sglang_hc.device.exactness import Exactness
from sglang_hc.forms import LayerPlan, PlanError
from sglang_hc.policy.cost_model import CostModel
from sglang_hc.policy.layer_plan import AutoPlan, auto_plan, explicit_plan
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments, parallel
from sglang_hc.srt.model import calibrate, families
from sglang_hc.srt.model.capture_memory import CaptureMemory, take_capture_memory
from sglang_hc.srt.model.exactness import (
    HiddenProof,
    choose_product,
    disagreement,
    of_all_ranks,
    prepare,
    use_plain_products,
)
from sglang_hc.srt.model.offload import ALL_RESIDENT, HostedWeights, settle
from sglang_hc.srt.model.offload_costs import grow_chunk, with_weights
from sglang_hc.srt.model.recompute import Pieces, not_exact, recompute_excluded
from sglang_hc.srt.model.scratch_layer import model_shape
from sglang_hc.srt.model.streamed import begin_streaming
from sglang_hc.srt.model.throughput_plan import settle_streaming
from sglang_hc.srt.ranks.start_group import StartGroup

logger = logging.getLogger(__name__)

WHOLE_HEADS = frozenset({"GPT2LMHeadModel"})
"""Models whose attention SGLang builds with the heads of all ranks on each rank."""

MODEL_STATE = "_hc_model"
"""Attribute of a ModelRunner that holds our `ModelState`."""


@dataclass(frozen=True)
class ModelState:
    """What `after_load_model` decided for one model runner.

    plan: of the whole model. has_stages: other ranks have the model's other layers. own_plan: of
    this rank's layers, numbered from 0. cost: to decide by; None where the machine could not be
    measured. measured: what `cost` was made of, which the next start begins with. layers: adapters
    of the held layers, None where none of them is hidden. memory: what capture needs of the device.
    proof: what was measured of hidden form, None where it is not used. group: the ranks that
    decided it together. weights: where they lie.
    """

    plan: LayerPlan
    has_stages: bool
    own_plan: LayerPlan
    cost: CostModel | None
    measured: CostModel | None
    layers: list[families.LayerAdapter] | None
    memory: CaptureMemory
    proof: HiddenProof | None
    group: StartGroup
    weights: HostedWeights = ALL_RESIDENT

    @property
    def in_turn(self) -> bool:
        """Whether a layer's weights are on the device in its own turn alone, and something else
        than a copy may need them."""
        return self.weights.ring is not None and self.plan.kv < self.plan.num_layers

    def exactness(self, restore: str, pieces: Pieces | None) -> Exactness:
        """Of everything that a restoration of this server may bring back; KV form is a copy.

        restore: `--hc-restore`. pieces: what was measured of recomputed layers, if they can be.
        """
        found = [(True, 0.0)]
        if self.plan.hidden:
            assert self.proof is not None
            found.append((self.proof.wrong is None, self.proof.difference))
        # With costs to decide by, layers that are stored may be recomputed as well.
        chosen = self.cost is not None and restore == "cost" and not self.has_stages
        if pieces is not None and (self.plan.recompute or chosen):
            found.append((pieces.bit, pieces.difference))
        exactness = Exactness(all(bit for bit, _ in found), max(error for _, error in found))
        word, error = exactness.stats().values()
        logger.info(
            "sglang-hc: exactness of what is restored: %s, measured difference at most %.1e",
            word,
            error,
        )
        return exactness


def after_load_model(result: Any, self: Any) -> None:
    """AFTER ModelRunner.load_model: plan, self-check, taps. With `--hc-throughput` there are no
    tiers: how state passes through the device is settled in their place."""
    config = config_of(arguments.of(self))
    if config is None or self.is_draft_worker:
        return
    group = StartGroup.of_model()
    refuse_model(self.model, group)
    weights = settle(self, config, group)
    layers = families.restorable_layers(self.model)
    for index, layer in enumerate(layers or ()):
        layer.ready = partial(weights.ready, index)
    prepare(arguments.of(self), layers, config.exact)
    reason = group.reason(hidden_excluded(self, layers))
    proof = None
    if reason is None:
        assert layers is not None
        proof = of_all_ranks(choose_product(layers, config.exact), group)
        reason = disagreement(proof, self.dtype) or _not_proven(self, config, proof)
    measured = calibrate.cost_model(self, config, layers, reason is None, group)
    cost = with_weights(self, _with_recurrent_layers(self, measured), weights, group)
    if config.throughput is not None:
        streams = settle_streaming(self, config, cost, weights, reason)
        begin_streaming(self, streams, layers if reason is None else None)
        if layers is not None and not streams.streaming.act_tokens:
            use_plain_products(layers)
        grow_chunk(self, cost, LayerPlan(0, 0, streams.model.layers), group)  # nothing is taken
        return
    held = families.held_layers(self.model, self.model_config.num_hidden_layers)
    stages = group.each(len(held))[:: parallel.tp_size()]
    plan = group.first(lambda: _plan(self, config, cost, reason, stages))
    if cost is not None and config.forms == "auto":
        cost.plan = plan  # on every rank, for the next start
    own = plan.over(stages)[parallel.pp_rank()]
    if layers is not None and not plan.hidden:
        use_plain_products(layers)
    cost = grow_chunk(self, cost, own, group)
    memory = take_capture_memory(self, own, group)
    layers = layers if own.hidden else None
    costs = cost, measured
    state = ModelState(plan, len(stages) > 1, own, *costs, layers, memory, proof, group, weights)
    setattr(self, MODEL_STATE, state)
    if memory.taps is not None:
        assert layers is not None
        for index, layer in enumerate(own.hidden_layers):
            memory.taps.install(index, layers[layer].qkv)


def refuse_model(model: torch.nn.Module, group: StartGroup) -> None:
    """Raise ConfigError for a model whose ranks do not hold what SGLang's other models hold."""
    name = type(model).__name__
    if group.size > 1 and name in WHOLE_HEADS:
        raise ConfigError(
            f"sglang-hc does not support --tp-size or --pp-size above 1 with {name}: SGLang tells "
            "each rank's attention of all heads. Leave the flag out, or add --hc-disable to serve "
            "without the tiers"
        )


def refuse_other_pools(ctx: Any) -> None:
    """Raise ConfigError for a model of whose state more than one kind is outside the KV pool of
    layers with full attention. ctx: what SGLang builds its tree from."""
    if ctx.is_hybrid_ssm and ctx.is_hybrid_swa:
        raise ConfigError(
            "sglang-hc does not support models with recurrent layers and sliding windows: both "
            "together were not tested. Add --hc-disable to serve without the tiers"
        )


def kept_layers(runner: Any) -> int:
    """Layers of the whole model that keep something of each token: all but recurrent ones."""
    if arguments.has_states(arguments.of(runner)):
        return model_shape(runner).num_layers
    return int(runner.model_config.num_hidden_layers)


def _with_recurrent_layers(runner: Any, cost: CostModel | None) -> CostModel | None:
    """`cost`, in which each layer that keeps something of each token takes its share of the others
    with it. These were not measured; what a layer takes besides attention is taken for them."""
    others = runner.model_config.num_hidden_layers - kept_layers(runner)
    if cost is None or not others:
        return cost
    return replace(cost, prefill=cost.prefill.of_layers(1 + others / kept_layers(runner)))


def _not_proven(runner: Any, config: HcConfig, proof: HiddenProof) -> str | None:
    """Why hidden form may not be used although it works: it is not bit-exact and has to be."""
    if not config.exact or proof.wrong is None:
        return None
    layers = kept_layers(runner)
    if config.forms != "auto" and explicit_plan(config.forms, layers).hidden:
        raise ConfigError(not_exact(config.forms, "hidden states", proof.wrong))
    reason = f"--hc-exact: hidden states are not bit-exact here ({proof.wrong})"
    logger.info("sglang-hc: %s; KV form is used", reason)
    return reason


def _plan(
    runner: Any,
    config: HcConfig,
    cost: CostModel | None,
    reason: str | None,
    stages: Sequence[int],
) -> LayerPlan:
    """The layer plan: what the user asked for, as far as this model can be restored that way.

    reason: why hidden states cannot be used; None when they can. stages: how many layers each stage
    of the pipeline has.
    """
    if config.forms == "auto":
        plan, why = _auto(runner, config, cost, reason)
        logger.info("sglang-hc: layer plan %s: %s", plan, why)
        return _for_all(plan, stages)
    plan = explicit_plan(config.forms, kept_layers(runner))
    if plan.hidden and reason is not None:
        logger.warning(
            "sglang-hc: --hc-forms %s is served without hidden: %s", config.forms, reason
        )
        plan = LayerPlan(plan.recompute, 0, plan.hidden + plan.kv)
    try:
        plan.over(stages)
    except PlanError as error:
        raise ConfigError(
            f"--hc-forms {config.forms} with --pp-size {len(stages)}: {error}"
        ) from None
    return plan


def _for_all(plan: LayerPlan, stages: Sequence[int]) -> LayerPlan:
    """`plan`, or where not every stage can have a layer of each form, all layers in the form that
    most of them have."""
    try:
        plan.over(stages)
    except PlanError:
        layers = plan.num_layers
        plan = LayerPlan(0, layers, 0) if plan.hidden > plan.kv else LayerPlan(0, 0, layers)
        logger.info("sglang-hc: layer plan %s, because every pipeline stage needs each form", plan)
    return plan


def _auto(
    runner: Any,
    config: HcConfig,
    cost: CostModel | None,
    reason: str | None,
) -> AutoPlan:
    """The fastest plan on the measured machine; unmeasured, the smaller form of every layer."""
    num_layers = kept_layers(runner)
    kv = LayerPlan(0, 0, num_layers)
    if cost is None:
        if reason is not None:
            return AutoPlan(kv, reason)
        shape = model_shape(runner)
        smaller = LayerPlan(0, num_layers, 0) if shape.hidden_bytes < shape.kv_bytes else kv
        return AutoPlan(smaller, "the smaller form per layer")
    found = auto_plan(
        cost,
        replace(model_shape(runner), num_layers=num_layers),
        calibrate.tiers_of(config),
        allow_hidden=reason is None,
        # Whether recomputation is bit-exact is known when there is a KV pool, later than the plan.
        # In a pipeline only layers of its first stage could be, which the costs do not know.
        allow_recompute=not config.exact
        and parallel.pp_size() == 1
        and recompute_excluded(arguments.of(runner), type(runner.model).__name__) is None,
    )
    return found if reason is None else found._replace(explanation=f"{found.explanation}; {reason}")


def hidden_excluded(runner: Any, layers: list[families.LayerAdapter] | None) -> str | None:
    """Why hidden states cannot be used with this model and these flags; None when they can."""
    args = arguments.of(runner)
    if layers is None:
        if families.family_of(runner.model) is not None:
            return f"the weights are quantised ({arguments.quantization(args)})"
        name = type(runner.model).__name__
        return f"{name} is not among the families restored from hidden states"
    if arguments.may_have_adapters(args):
        return "adapters change the projection per request"
    dtype = arguments.kv_cache_dtype(args)
    if dtype not in ("auto", str(runner.dtype).removeprefix("torch.")):
        return f"the KV cache is {dtype}"
    return None
