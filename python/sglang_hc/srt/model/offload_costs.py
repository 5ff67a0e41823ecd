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
"""A pass is taken to hold so many times what the products of one layer give."""


def with_weights(
    runner: Any, cost: CostModel | None, weights: HostedWeights, group: StartGroup
) -> CostModel | None:
    """`cost`, with what the weights of this start take, at the measured speed of the link. Passes
    whose size nobody gave may grow (`grow_chunk`), and count as long as a prompt until then."""
    if cost is None:
        return None
    args, chunk = arguments.of(runner), None
    if weights.ring is not None and arguments.chunk_was_given(args):
        chunk = arguments.pass_sizes(args).chunk
    per_byte = cost.copies[SourceTier.HOST].kv.per_token / model_shape(runner).kv_bytes
    weight_seconds = group.most(weights.layer_bytes * per_byte)
    return replace(cost, weights=weight_seconds, pass_tokens=chunk)


def grow_chunk(
    runner: Any, cost: CostModel | None, plan: LayerPlan, group: StartGroup
) -> CostModel | None:
    """Let a pass compute for as long as its weights take to come, unless the user named its size,
    or experts exchange tokens through buffers, which have the old one. Returns `cost` with the
    tokens of a pass. plan: of this rank's layers."""
    args = arguments.of(runner)
    chunk = arguments.pass_sizes(args).chunk
    if cost is None or not cost.weights or chunk is None:
        return cost
    if not arguments.chunk_was_given(args) and not arguments.exchanges_tokens(args):
        chunk = _grow(runner, cost, chunk, plan, group)
    return replace(cost, pass_tokens=chunk)


def _grow(runner: Any, cost: CostModel, chunk: int, plan: LayerPlan, group: StartGroup) -> int:
    """Make a pass longer than `chunk` tokens if that pays; returns its tokens."""
    args = arguments.of(runner)
    computed, taken = _row_bytes(runner, plan)
    total = _device_bytes(runner)
    room = LONGEST_CHUNK if total is None else total // PASS_SHARE // (computed + taken)
    most = min(arguments.pass_sizes(args).uncut, chunk + group.least(room))
    grown = balanced_chunk(cost.prefill, cost.weights, chunk, most)
    if grown == chunk:
        return chunk
    _, static = arguments.first_gpu(args)
    if total is not None:  # what is taken is gone when SGLang measures what is left
        static -= group.most(computed * (grown - chunk) / total)
    arguments.grow_chunk(args, grown, static)
    logger.info(
        "sglang-hc: passes have %d tokens instead of %d: weights take %.3g s to come",
        *(grown, chunk, cost.weights * runner.model_config.num_hidden_layers),
    )
    return grown


def _row_bytes(runner: Any, plan: LayerPlan) -> tuple[int, int]:
    """Of the device, for each token of a pass: activations, and hidden states that are taken."""
    width = layer_weights(runner.model) / runner.model_config.hidden_size
    taken = plan.hidden * model_shape(runner).hidden_bytes
    return int(ACTIVATIONS * width * runner.dtype.itemsize), taken


def _device_bytes(runner: Any) -> int | None:
    """Memory of the device; None where the host's is the device's."""
    if torch.device(runner.device).type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(runner.device).total_memory)
