"""What weights in host memory cost: a layer's least time, and passes that are worth it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.offload import LONGEST_CHUNK, balanced_chunk
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.model.offload import PASS_SHARE, HostedWeights
from sglang_hc.srt.model.scratch_layer import layer_weights, model_shape
from sglang_hc.srt.ranks.start_group import StartGroup

logger = logging.getLogger(__name__)

ACTIVATIONS = 2
"""A pass holds at most so many times what the products of one layer give."""


def with_weights(
    runner: Any, cost: CostModel | None, weights: HostedWeights, group: StartGroup
) -> CostModel | None:
    """`cost`, with what the weights of this start take, at the measured speed of the link."""
    if cost is None:
        return None
    per_byte = cost.copies[SourceTier.HOST].kv.per_token / model_shape(runner).kv_bytes
    return replace(cost, weights=group.most(weights.layer_bytes * per_byte))


def grow_chunk(runner: Any, cost: CostModel | None, plan: LayerPlan, group: StartGroup) -> None:
    """Let a pass compute for as long as its weights take to come, unless the user named its size.
    plan: of this rank's layers."""
    args = arguments.of(runner)
    sizes = arguments.pass_sizes(args)
    chunk = sizes.chunk
    if cost is None or not cost.weights or chunk is None or arguments.chunk_was_given(args):
        return
    row = _row_bytes(runner, plan)
    total = _device_bytes(runner)
    room = LONGEST_CHUNK if total is None else total // PASS_SHARE // row
    most = min(sizes.uncut, chunk + group.least(room))
    grown = balanced_chunk(cost.prefill, cost.weights, chunk, most)
    if grown == chunk:
        return
    _, static = arguments.first_gpu(args)
    if total is not None:
        static -= group.most(row * (grown - chunk) / total)
    arguments.grow_chunk(args, grown, static)
    logger.info(
        "sglang-hc: passes have %d tokens instead of %d: weights take %.3g s to come",
        *(grown, chunk, cost.weights * runner.model_config.num_hidden_layers),
    )


def _row_bytes(runner: Any, plan: LayerPlan) -> int:
    """Of the device, for each token of a pass: activations, and hidden states that are taken."""
    width = layer_weights(runner.model) / runner.model_config.hidden_size
    taken = plan.hidden * model_shape(runner).hidden_bytes
    return int(ACTIVATIONS * width * runner.dtype.itemsize) + taken


def _device_bytes(runner: Any) -> int | None:
    """Memory of the device; None where the host's is the device's."""
    if torch.device(runner.device).type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(runner.device).total_memory)
