"""What is settled at load of a model whose running requests have their state in host memory
(`--hc-throughput`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sglang_hc.config import HOST_SHARE, HcConfig
from sglang_hc.forms import StateShape
from sglang_hc.memory import GIB, available_memory
from sglang_hc.policy.streaming import Streaming, ThroughputSpec
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.model.families import LayerAdapter
from sglang_hc.srt.model.scratch_layer import model_shape

logger = logging.getLogger(__name__)

STREAMED = "_hc_streamed"
"""Attribute of SGLang's model that holds our `Streamed`."""


@dataclass(frozen=True)
class Streamed:
    """shape: of one layer's state. layers: adapters of the model's layers, None where nothing is
    kept as hidden states."""

    streaming: Streaming
    shape: StateShape
    layers: list[LayerAdapter] | None


def streamed_of(model: Any) -> Streamed | None:
    """What was settled for SGLang's model; None where state stays on the device."""
    return getattr(model, STREAMED, None)


def begin_streaming(runner: Any, config: HcConfig, layers: list[LayerAdapter] | None) -> None:
    """Settle how state is kept, and have SGLang count with as many slots. layers: None where hidden
    states cannot be used."""
    assert config.throughput is not None
    spec, shape = ThroughputSpec.parse(config.throughput), model_shape(runner)
    streaming = _settled(runner, spec, shape)
    arguments.set_pool_tokens(arguments.of(runner), streaming.tokens)
    logger.info(
        "sglang-hc: --hc-throughput: %d tokens in host memory, %d of them as hidden states (%d on "
        "the device), and two places of %d tokens",
        *(streaming.tokens, streaming.act_tokens, streaming.device_act, streaming.rows),
    )
    adapters = layers if streaming.act_tokens else None
    setattr(runner.model, STREAMED, Streamed(streaming, shape, adapters))


def _settled(runner: Any, spec: ThroughputSpec, shape: StateShape) -> Streaming:
    """By what the specification says alone."""
    act = spec.act or 0.0
    row = shape.num_layers * (act * shape.hidden_bytes + (1 - act) * shape.kv_bytes)
    room = available_memory() * HOST_SHARE if spec.host_gb is None else spec.host_gb * GIB
    tokens = arguments.pool_tokens(arguments.of(runner)) or int(room / row)
    act_tokens = round(act * tokens)
    device_act = int((spec.device_act_gb or 0.0) * GIB / shape.num_layers / shape.hidden_bytes)
    longest = min(runner.model_config.context_len, tokens)
    rows = max(-(-tokens // (spec.rounds or 1)), longest)
    return Streaming(tokens, act_tokens, min(device_act, act_tokens), rows)
