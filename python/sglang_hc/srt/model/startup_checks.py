"""At start: does the fast path give the K and V that the model's own attention module gives?"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from sglang_hc.device.exactness import relative_error
from sglang_hc.srt.model.families import LayerAdapter

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest difference allowed, relative to the largest magnitude. A projection of other row counts
may add up in another order; anything wrong (a bias, a norm, a rotation) is off by far more."""


class _Intercepted(Exception):
    """K and V have reached attention; nothing after it is run."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__()
        self.k, self.v = k, v


def disagreement(
    adapters: Sequence[LayerAdapter], layers: Sequence[int], hidden_size: int, dtype: torch.dtype
) -> str | None:
    """Compare both paths on a few tokens of some layers. None: they agree; else what differs."""
    for layer in layers:
        adapter = adapters[layer]
        device = adapter.qkv.weight.device
        generator = torch.Generator().manual_seed(layer)
        hidden = torch.randn((5, hidden_size), generator=generator).to(device, dtype)
        positions = torch.tensor([0, 1, 7, 63, 200], dtype=torch.int64, device=device)
        with torch.no_grad():
            wanted = model_kv(adapter.attention, adapter.radix, hidden.clone(), positions)
            got = adapter.project(hidden, positions)
        for name, a, b in zip("KV", wanted, got, strict=True):
            if a.numel() != b.numel():
                return f"layer {layer}: {name} has {b.numel()} elements, the model has {a.numel()}"
            error = relative_error(a.reshape(b.shape), b)
            if not error <= TOLERANCE[dtype]:
                return f"layer {layer}: {name} differs from the model's own by {error:.2e}"
    return None


def model_kv(
    attention: Any, radix: Any, hidden: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as the model computes them: a layer's attention module runs up to its part `radix`,
    which reads the pool. It may change its inputs. Raises what the module raises."""

    def intercept(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object):
        raise _Intercepted(k, v)

    known = {"hidden_states": hidden, "positions": positions, "position_ids": positions}
    names = inspect.signature(attention.forward).parameters
    arguments = {name: known.get(name) for name in names}
    original = radix.forward
    radix.forward = intercept
    try:
        attention.forward(**arguments)
    except _Intercepted as caught:
        return caught.k, caught.v
    finally:
        del radix.forward
        assert radix.forward == original
    raise RuntimeError("the attention module did not reach its attention layer")
