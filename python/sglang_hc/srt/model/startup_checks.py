"""What the checks at start compare with: K and V as the model's own attention module gives them."""

from __future__ import annotations

import inspect
from typing import Any

import torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest difference allowed, relative to the largest magnitude. A projection of other row counts
may add up in another order; anything wrong (a bias, a norm, a rotation) is off by far more."""


class _Intercepted(Exception):
    """K and V have reached attention; nothing after it is run."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__()
        self.k, self.v = k, v


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
