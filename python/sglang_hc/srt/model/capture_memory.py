"""Device memory that capture needs, sized and taken when the model is loaded.

That is before SGLang measures how much is left for its KV pool, so `--mem-fraction-static` covers
it and nothing has to be left free for it by hand.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_hc.capture.direct import DeviceRing
from sglang_hc.capture.taps import SideBranch, TapBuffer
from sglang_hc.capture.verified import PASSES, VerifiedRows
from sglang_hc.device.copy_stream import distinct_stream
from sglang_hc.errors import ConfigError
from sglang_hc.forms import LayerPlan, StateShape
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.model.columns import columns_of
from sglang_hc.srt.model.scratch_layer import model_shape
from sglang_hc.srt.ranks.start_group import StartGroup

logger = logging.getLogger(__name__)

UNCHUNKED_ROWS = 16_384
"""Rows of the taps when prompts are not cut into chunks: SGLang's largest chunk by default. A
model's whole context would be tens of GB."""

SNAPSHOT_BUFFERS = 6

RING_SHARE = 0.05
"""Most of the device's memory that rows on their way to the host may take. A smaller ring than a
pass loses nothing; the next pass may wait for the link."""


@dataclass(frozen=True)
class CaptureSizes:
    """What capture needs for passes of `rows` rows. Bytes are on the device.

    snapshot_rows: of one of SNAPSHOT_BUFFERS buffers for rows that come few at a time.
    verified_rows: most rows of a verify pass that are accepted; 0 without speculative decoding.
    """

    rows: int
    tap_bytes: int
    ring_bytes: int
    snapshot_rows: int
    staging_bytes: int
    verified_rows: int

    @property
    def bytes(self) -> int:
        verified = PASSES * self.verified_rows * self.tap_bytes // self.rows
        return self.tap_bytes + self.ring_bytes + self.staging_bytes + verified


@dataclass(frozen=True)
class CaptureMemory:
    """taps: None without hidden layers. ring, staging: None on a device without memory of its own.

    staging: where snapshots are gathered before they are copied to the host. verified: None without
    taps or without speculative decoding.
    """

    sizes: CaptureSizes
    taps: TapBuffer | None
    verified: VerifiedRows | None
    ring: DeviceRing | None
    staging: torch.Tensor | None

    @property
    def streams(self) -> list[Any]:
        """Streams of capture alone; no other work should be submitted to them."""
        branch = None if self.taps is None else self.taps.branch
        return [] if branch is None else [branch.stream]


def capture_sizes(
    args: Any, plan: LayerPlan, layer: StateShape, context: int, device_bytes: int | None
) -> CaptureSizes:
    """args: SGLang's. layer: one layer's state. device_bytes: memory of the device, None where the
    host's memory is the device's."""
    sizes, rows = arguments.pass_sizes(args), rows_per_pass(args, context)
    hidden = plan.hidden * layer.hidden_bytes
    kv = plan.kv * sum(layer.kv_parts)
    step = decode_rows(sizes)
    verified = step if sizes.proposed else 0
    # Three decode steps of all requests: one computed, one copied, one scattered.
    snapshot = min(512, max(128, step * 3 // SNAPSHOT_BUFFERS))
    if device_bytes is None:
        return CaptureSizes(rows, rows * hidden, 0, snapshot, 0, verified)
    ring = min(rows * max(hidden, kv), int(device_bytes * RING_SHARE))
    staging = SNAPSHOT_BUFFERS * snapshot * hidden
    return CaptureSizes(rows, rows * hidden, ring, snapshot, staging, verified)


def rows_per_pass(args: Any, context: int) -> int:
    """Most rows of one forward pass that are captured: a prefill chunk, or a decode step of all
    requests, or both where they are mixed."""
    sizes = arguments.pass_sizes(args)
    prefill = sizes.chunk or min(max(sizes.uncut, context), UNCHUNKED_ROWS)
    step = decode_rows(sizes)
    return prefill + step if sizes.is_mixed else max(prefill, step)


def decode_rows(sizes: arguments.PassSizes) -> int:
    """Rows of a decode step of all requests: with speculative decoding those that are verified.
    More requests cost saves while scattering is behind, nothing else."""
    return sizes.requests * (sizes.proposed or 1)


def take_capture_memory(runner: Any, plan: LayerPlan, group: StartGroup) -> CaptureMemory:
    """For a loaded model. All ranks of the group take the same. Raises ConfigError when the device
    has not enough."""
    args, context = arguments.of(runner), runner.model_config.context_len
    layer = model_shape(runner)
    device = next(runner.model.parameters()).device
    own = device.type == "cuda"
    total = None
    if own:
        total = group.least(torch.cuda.get_device_properties(device).total_memory)
    sizes = capture_sizes(args, plan, layer, context, total)
    chunk = arguments.pass_sizes(args).chunk
    if sizes.rows < context and chunk is None and plan.hidden:
        logger.info(
            "sglang-hc: without --chunked-prefill-size a pass may have %d rows; the hidden states "
            "of its first %d are saved",
            context,
            sizes.rows,
        )
    try:
        taps = verified = ring = staging = None
        if plan.hidden:
            width = layer.hidden_bytes // runner.dtype.itemsize
            first = columns_of(runner.model_config.hidden_size).first
            branch = _tap_branch(runner, device)
            taps = TapBuffer(plan.hidden, sizes.rows, width, runner.dtype, device, branch, first)
            if sizes.verified_rows:
                verified = VerifiedRows(taps, sizes.verified_rows)
        if own:
            ring = DeviceRing(sizes.ring_bytes, device)
            staging = torch.empty(sizes.staging_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch's out of memory, on any device
        what, _, _ = str(error).partition("\n")
        raise ConfigError(
            f"saving passes of {sizes.rows} rows takes {sizes.bytes / 2**30:.1f} GiB beside the "
            "model's weights, and there is not so much; give a smaller --chunked-prefill-size "
            f"(now {chunk or -1}), or --hc-forms kv ({what})"
        ) from None
    return CaptureMemory(sizes, taps, verified, ring, staging)


def _tap_branch(runner: Any, device: torch.device) -> SideBranch | None:
    """Where the taps' copies run on a GPU, so that they take no time of the decode step's own."""
    if device.type != "cuda":
        return None
    model = [torch.cuda.current_stream(device), runner.forward_stream]
    return SideBranch(torch.cuda, distinct_stream(partial(torch.cuda.Stream, device=device), model))
