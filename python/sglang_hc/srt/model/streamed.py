"""What is settled at load of a model whose running requests have their state in host memory
(`--hc-throughput`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sglang_hc.config import ConfigError
from sglang_hc.forms import StateShape
from sglang_hc.policy.streaming import Streaming
from sglang_hc.policy.streaming_plan import StreamingPlan
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.model.families import LayerAdapter
from sglang_hc.srt.model.offload import masks_images
from sglang_hc.srt.model.scratch_layer import model_shape, reads_elsewhere

logger = logging.getLogger(__name__)

STREAMED = "_hc_streamed"
"""Attribute of SGLang's model that holds our `Streamed`."""

MASKED = (
    "--hc-throughput: images of this model attend in both directions, by a mask that SGLang gives "
    "to its own attention back end alone; leave the flag or --enable-multimodal out"
)


ELSEWHERE = (
    "--hc-throughput: layers of this model attend to K and V of another layer or of an encoder, "
    "and only their own are in the places; leave the flag out"
)


@dataclass(frozen=True)
class Streamed:
    """shape: of one layer's state. layers: adapters of the model's layers, None where nothing is
    kept as hidden states. plan: what is expected of passes, where that is known."""

    streaming: Streaming
    shape: StateShape
    layers: list[LayerAdapter] | None
    plan: StreamingPlan | None = None


def streamed_of(model: Any) -> Streamed | None:
    """What was settled for SGLang's model; None where state stays on the device."""
    return getattr(model, STREAMED, None)


def begin_streaming(runner: Any, plan: StreamingPlan, layers: list[LayerAdapter] | None) -> None:
    """Keep state as it was settled, and have SGLang count with as many slots. layers: None where
    hidden states cannot be used. Raises ConfigError for a model that masks its images, or whose
    layers read what another one has computed."""
    if masks_images(runner):
        raise ConfigError(MASKED)
    if reads_elsewhere(runner.model):
        raise ConfigError(ELSEWHERE)
    streaming = plan.streaming
    arguments.set_pool_tokens(arguments.of(runner), streaming.tokens)
    logger.info(
        "sglang-hc: --hc-throughput: %d tokens in host memory, %d of them as hidden states (%d on "
        "the device), and two places of %d tokens",
        *(streaming.tokens, streaming.act_tokens, streaming.device_act, streaming.rows),
    )
    adapters = layers if streaming.act_tokens else None
    streamed = Streamed(streaming, model_shape(runner), adapters, plan)
    setattr(runner.model, STREAMED, streamed)
