"""`--hc-throughput`: how state of running requests is kept on this machine, and whether anything
else would serve the model faster."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

from sglang_hc.config import ConfigError, HcConfig
from sglang_hc.forms import StateShape
from sglang_hc.memory import GIB, available_memory
from sglang_hc.policy.cost_model import LONG_HISTORY, CostModel, SourceTier
from sglang_hc.policy.streamed_pass import PLACES, ROUND_SECONDS, StreamedModel
from sglang_hc.policy.streaming import ThroughputSpec
from sglang_hc.policy.streaming_plan import (
    AUTO,
    Setting,
    StreamingPlan,
    comparison,
    lines,
    refuse_slower,
    settle,
)
from sglang_hc.policy.throughput import (
    CPU_GBPS,
    CPU_TFLOPS,
    DEFAULT_CONTEXT,
    DEFAULT_OUTPUT,
    Processor,
    Requests,
)
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.model.offload import HostedWeights, device_room
from sglang_hc.srt.model.scratch_layer import (
    layer_bytes,
    layer_weights,
    model_shape,
    stored_weights,
)

logger = logging.getLogger(__name__)

STATE_SHARE = 0.8
"""Share of the free host memory that state takes when no size is given; there are no tiers beside
it."""

OWN_SHARE = 0.1
"""Of that, what counts as the device's where the host's memory is the device's."""

LEAST = 1e-15
"""Seconds that anything takes: a profile may say 0."""


def settle_streaming(
    runner: Any,
    config: HcConfig,
    cost: CostModel | None,
    weights: HostedWeights,
    no_hidden: str | None,
) -> StreamingPlan:
    """Behind the load of the weights: the fastest way to keep state that the specification leaves.

    no_hidden: why nothing may be kept as hidden states; None when it may. Raises ConfigError for
    what cannot be, for what does not fit, and with `auto` where another way is modelled faster.
    """
    assert config.throughput is not None
    if cost is None:
        raise ConfigError(
            "--hc-throughput: this machine could not be measured (the log says why), so nothing "
            "can be planned; give --hc-profile FILE"
        )
    spec = ThroughputSpec.parse(config.throughput)
    setting = _setting(runner, spec, cost, weights, no_hidden)
    plan = settle(setting, spec)
    found = comparison(setting)
    for line in lines(setting, plan, found):
        logger.info("sglang-hc: --hc-throughput: %s", line)
    if spec == AUTO and found is not None:
        refuse_slower(setting, plan, found)
    served = plan.served
    logger.info(
        "sglang-hc: --hc-throughput: as it is served, a pass of %d requests is modelled at %.3g s "
        "(link %.3g, compute %.3g), %.3g tokens/s",
        *(served.load.requests, served.seconds, *served.times, served.tokens_per_second),
    )
    return plan


def _setting(
    runner: Any,
    spec: ThroughputSpec,
    cost: CostModel,
    weights: HostedWeights,
    no_hidden: str | None,
) -> Setting:
    args, shape = arguments.of(runner), model_shape(runner)
    free = available_memory() * STATE_SHARE
    host = free if spec.host_gb is None else spec.host_gb * GIB
    own = device_room(runner)
    device = int(free * OWN_SHARE) if own is None else own
    if spec.device_gb is not None:
        device = int(spec.device_gb * GIB)
    served = _streamed_model(runner, shape, cost, weights, no_hidden)
    per_layer = layer_bytes(runner.model)
    hosted = served.layers * served.weights
    places = 0 if weights.ring is None else sum(place.numel() for place in weights.ring.places)
    whole = replace(
        served,
        weights=per_layer,
        load_w=per_layer * served.load_kv / served.kv,
        host=host + hosted,
        device=device + places + served.layers * per_layer - hosted,
    )
    longest = int(runner.model_config.context_len)
    output = min(DEFAULT_OUTPUT, max(1, longest // 2))
    return Setting(
        served=replace(served, host=host + hosted, device=device + PLACES * served.weights),
        whole=whole,
        requests=Requests(max(1, min(DEFAULT_CONTEXT, longest - output)), output),
        cpu=Processor(CPU_GBPS * 1e9, 2 * layer_weights(runner.model) / (CPU_TFLOPS * 1e12)),
        longest=longest,
        tokens=arguments.pool_tokens(args),
        running=arguments.most_running(args),
        is_apart=own is not None,
        no_hidden=no_hidden,
    )


def _streamed_model(
    runner: Any,
    shape: StateShape,
    cost: CostModel,
    weights: HostedWeights,
    no_hidden: str | None,
) -> StreamedModel:
    """Costs of a layer by the measured ones. Rooms are 0."""
    host, many = SourceTier.HOST, LONG_HISTORY
    load_kv = max(LEAST, cost.copy_kv(host, many) / many)
    hidden, kv_gen = shape.hidden_bytes, math.inf
    if no_hidden is None and 0 < hidden <= shape.kv_bytes:
        kv_gen = max(LEAST, cost.project_kv(many) / many)
    config = runner.model_config
    hidden_bytes = config.hidden_size * runner.dtype.itemsize
    crossing = weights.layer_bytes
    active = min(1.0, layer_weights(runner.model) / stored_weights(runner.model))
    prefill, project = cost.prefill, cost.project
    read_w = max(LEAST, prefill.floor / active)
    output_layer = config.vocab_size * hidden_bytes / layer_bytes(runner.model)
    return StreamedModel(
        layers=shape.num_layers,
        weights=crossing,
        kv=float(shape.kv_bytes),
        act=float(hidden or hidden_bytes),
        load_w=crossing * load_kv / shape.kv_bytes,
        load_kv=load_kv,
        load_act=load_kv * hidden / shape.kv_bytes,
        kv_gen=kv_gen,
        read_w=read_w,
        read_kv=prefill.per_context if cost.step is None else cost.step.per_context,
        per_new=max(LEAST, prefill.per_token),
        per_pair=prefill.per_pair,
        per_round=ROUND_SECONDS + (0.0 if project is None else project.floor),
        outside=read_w * output_layer,
        active=active,
        host=0.0,
        device=0.0,
    )
