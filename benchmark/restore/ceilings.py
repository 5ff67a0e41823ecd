"""What the machine can do at best: copies into the device and matrix products, measured here.

Of several repeats the fastest counts: a ceiling is not lowered by what else ran.
"""

from __future__ import annotations

import mmap

import torch
from torch.nn.functional import linear

from benchmark.restore.engine import Engine
from sglang_hc.forms import LayerPlan
from sglang_hc.tools.model_shape import ModelShape

REPEATS = 5


def copy_bandwidth(engine: Engine) -> float:
    """Bytes a second of one long copy from pinned host memory by the copy stream."""
    size = (2 << 30) if engine.device.type == "cuda" else (128 << 20)
    buffer = mmap.mmap(-1, size)
    source = torch.frombuffer(buffer, dtype=torch.uint8)
    source.fill_(1)
    engine.copy_stream.pin(buffer)
    target = torch.empty(size, dtype=torch.uint8, device=engine.device)
    engine.copy_stream.copy(target, source)
    times = [
        engine.seconds(lambda: engine.copy_stream.copy(target, source)) for _ in range(REPEATS)
    ]
    return size / min(times)


def gemm_rate(engine: Engine) -> float:
    """Floating-point operations a second of a large square product, laid out as a layer's."""
    n = 8192 if engine.device.type == "cuda" else 2048
    states, weight = (torch.randn(n, n, device=engine.device).to(engine.dtype) for _ in "ab")
    linear(states, weight)
    times = [engine.seconds(lambda: linear(states, weight)) for _ in range(REPEATS)]
    return 2 * n**3 / min(times)


def bound(
    engine: Engine, model: ModelShape, plan: LayerPlan, tokens: int, bandwidth: float, rate: float
) -> float:
    """Seconds that a restoration takes at least: its bytes over the bandwidth, or its operations
    over the rate. `plan`: what is recomputed, loaded as hidden states, loaded as KV."""
    state = engine.shape
    moved = tokens * (plan.hidden * state.hidden_bytes + plan.kv * state.kv_bytes)
    projected = 2 * model.kv_projection_params * tokens
    pairs = tokens * (tokens + 1) / 2
    layer = 2 * model.layer_params * tokens + model.attention_flops_per_pair * pairs
    # The last recomputed layer ends with its attention; its feed-forward part is not run.
    operations = plan.hidden * projected + plan.recompute * layer
    return max(moved / bandwidth, operations / rate)
