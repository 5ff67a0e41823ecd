"""Torch implementations: what runs without a GPU, and the oracle of every kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_hc_kernels.contracts import FP8, Epilogue, KNorm, Rotary


def rms_norm(x: torch.Tensor, norm: KNorm) -> torch.Tensor:
    """RMSNorm over the last dimension in float32, rounded once to the dtype of `x`."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + norm.eps)
    return (wide * scale * norm.weight.float()).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """RoPE of [n, heads, dim] at `positions`, in float32, rounded to the dtype of `x`."""
    half = rotary.dim // 2
    cos, sin = rotary.cos_sin_cache[positions].float().unsqueeze(1).split(half, dim=-1)
    pairs = x[..., : rotary.dim].float()
    if rotary.interleaved:
        first, second = pairs[..., 0::2], pairs[..., 1::2]
    else:
        first, second = pairs[..., :half], pairs[..., half:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    mixed = torch.stack(turned, -1).flatten(-2) if rotary.interleaved else torch.cat(turned, -1)
    return torch.cat((mixed.to(x.dtype), x[..., rotary.dim :]), dim=-1)


def _store(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
    if pool.dtype == FP8:
        limit = torch.finfo(FP8).max
        scaled = (rows.float() / scale).to(rows.dtype).float().clamp(-limit, limit)
        # Index assignment has no fp8 kernel on CPU; the bytes are the same.
        pool.view(torch.uint8)[slots] = scaled.to(FP8).view(torch.uint8)
    else:
        pool[slots] = rows


def kv_epilogue(
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    epilogue: Epilogue,
) -> None:
    """As `ops.kv_epilogue`. Raises IndexError for a position or slot past the end."""
    heads, dk = k_pool.shape[1:]
    kept = slots >= 0
    kv, positions, slots = kv[kept], positions[kept], slots[kept]
    if epilogue.bias is not None:
        kv = (kv.float() + epilogue.bias.float()).to(kv.dtype)
    k = kv[:, : heads * dk].unflatten(1, (heads, dk))
    v = kv[:, heads * dk :].unflatten(1, (heads, v_pool.shape[2]))
    if epilogue.k_norm is not None:
        k = rms_norm(k, epilogue.k_norm)
    if epilogue.rotary is not None:
        k = rotate(k, positions, epilogue.rotary)
    _store(k_pool, slots, k, epilogue.k_scale)
    _store(v_pool, slots, v, epilogue.v_scale)


def gather_rows(
    buffers: Sequence[torch.Tensor], slots: torch.Tensor, staging: torch.Tensor
) -> None:
    """As `ops.gather_rows`. Raises IndexError for a slot past the end."""
    places = (slots >= 0).nonzero().squeeze(1)
    for buffer, layer in zip(buffers, staging, strict=True):
        layer[places] = buffer.flatten(1).view(torch.uint8)[slots[places]]
