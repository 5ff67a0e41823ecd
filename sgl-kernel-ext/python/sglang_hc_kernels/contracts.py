"""What callers hand in, and the checks that both implementations share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class ArgumentError(ValueError):
    """A tensor whose shape, dtype, device or strides break the contract. Names the argument."""


def require(condition: bool, message: str) -> None:
    """Raises ArgumentError with `message` unless the condition holds."""
    if not condition:
        raise ArgumentError(message)


@dataclass(frozen=True)
class KNorm:
    """RMSNorm over each K head: `weight` is [Dk] of any float dtype, `eps` as in the model."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of K.

    cos_sin_cache: [max_pos, rot_dim], float32 for SGLang's CUDA numerics; the first half of a row
    holds the cosines, the second half the sines. `rot_dim` may be less than the head size; the
    rest of the head passes through. interleaved: pairs are (2i, 2i+1) (GPT-J) instead of
    (i, i + rot_dim / 2) (neox).
    """

    cos_sin_cache: torch.Tensor
    interleaved: bool = False

    @property
    def dim(self) -> int:
        return self.cos_sin_cache.shape[1]


@dataclass(frozen=True)
class Epilogue:
    """What stands between the K/V projection and the pool, in this order; each step is optional.

    bias: [Hkv * Dk + Hkv * Dv]; leave it out when it was added already.
    k_scale, v_scale: divisors applied when the pool is float8_e4m3fn; ignored otherwise, as in
    SGLang. Values beyond the format's range saturate.
    Each step computes in float32 and rounds to the dtype of the projection.
    """

    bias: torch.Tensor | None = None
    k_norm: KNorm | None = None
    rotary: Rotary | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


def check_epilogue(
    columns: int,
    like: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    epilogue: Epilogue,
) -> None:
    """Checks shapes, dtypes and devices; `like` is the [n, ...] input, `columns` the K/V width."""
    n = like.shape[0]
    require(like.dtype in FLOATS, f"input dtype {like.dtype}: give bfloat16, float16 or float32")
    for name, index in (("positions", positions), ("slots", slots)):
        require(
            index.dtype == torch.int64 and index.shape == (n,) and index.is_contiguous(),
            f"{name}: must be a contiguous int64 tensor of {n} elements",
        )
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        require(
            pool.dim() == 3 and (not pool.numel() or pool[0].is_contiguous()),
            f"{name}: must be [slots, heads, dim] with contiguous rows",
        )
        require(
            pool.dtype in (like.dtype, FP8),
            f"{name}: dtype {pool.dtype} must be {like.dtype} or {FP8} (view a uint8 store as fp8)",
        )
    require(
        k_pool.shape[:2] == v_pool.shape[:2] and k_pool.dtype == v_pool.dtype,
        "k_pool and v_pool: slots, heads and dtype must agree",
    )
    heads, dk = k_pool.shape[1:]
    width = heads * (dk + v_pool.shape[2])
    require(columns == width, f"K/V width is {columns} but the pools' heads need {width}")
    tensors = [positions, slots, k_pool, v_pool]
    if epilogue.bias is not None:
        require(epilogue.bias.shape == (width,), f"bias: must have {width} elements")
        tensors.append(epilogue.bias)
    if epilogue.k_norm is not None:
        require(epilogue.k_norm.weight.shape == (dk,), f"k_norm.weight: must have {dk} elements")
        tensors.append(epilogue.k_norm.weight)
    if epilogue.rotary is not None:
        cache = epilogue.rotary.cos_sin_cache
        require(
            cache.dim() == 2 and cache.shape[1] % 2 == 0 and 0 < cache.shape[1] <= dk,
            f"rotary.cos_sin_cache: must be [max_pos, rot_dim] with even rot_dim, at most {dk}",
        )
        tensors.append(cache)
    require(
        all(tensor.device == like.device for tensor in tensors),
        f"all tensors must be on {like.device}",
    )
    require(epilogue.k_scale > 0 and epilogue.v_scale > 0, "k_scale, v_scale: must be positive")


def row_bytes(buffer: torch.Tensor) -> int:
    """Bytes of one row of a [rows, ...] buffer."""
    return buffer[0].numel() * buffer.element_size() if buffer.shape[0] else 0


def check_rows(name: str, buffers: Sequence[torch.Tensor]) -> None:
    """Checks that buffers are equal-shaped [rows, ...] tensors whose rows are contiguous."""
    require(len(buffers) > 0, f"{name}: give at least one buffer")
    first = buffers[0]
    for buffer in buffers:
        require(
            buffer.shape == first.shape
            and buffer.dtype == first.dtype
            and buffer.stride() == first.stride(),
            f"{name}: all buffers must have one shape, dtype and stride",
        )
    require(
        first.dim() >= 2 and first.shape[0] > 0 and first[0].is_contiguous(),
        f"{name}: must be [rows, ...] with at least one row and contiguous rows",
    )


def check_staging(staging: torch.Tensor, layers: int, rows: int, row_bytes: int) -> None:
    """Checks that rows of `row_bytes` bytes of so many layers find their place."""
    require(
        staging.dtype == torch.uint8 and staging.dim() == 3 and staging.stride(2) == 1,
        "staging: must be a uint8 tensor [layers, rows, bytes] with contiguous rows",
    )
    require(
        staging.shape[0] == layers and staging.shape[2] == row_bytes,
        f"staging: {staging.shape[0]} layers of {staging.shape[2]} bytes a row cannot take "
        f"{layers} of {row_bytes}",
    )
    require(staging.shape[1] >= rows, f"staging: {staging.shape[1]} rows cannot take {rows}")


def check_index(name: str, index: torch.Tensor) -> None:
    """Checks a row index: contiguous int64, one dimension."""
    require(
        index.dtype == torch.int64 and index.dim() == 1 and index.is_contiguous(),
        f"{name}: must be a contiguous one-dimensional int64 tensor",
    )
