"""Fused projection of hidden states to K and V with the epilogue: one launch per layer.

The columns of a head's weight are read in the order of `triton_kv`'s pairs, so the accumulators
come out split the way RoPE wants them and never pass through memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_hc_kernels.contracts import Epilogue
from sglang_hc_kernels.triton_kv import epilogue_arguments, finish_head, pair_columns

FEW, MANY = 16, 512
"""Row counts at which `default_tile` changes: up to the first, up to the second, above."""

_SHARED_BYTES = 96 * 1024
"""Tiles in flight per program, which every GPU since sm_80 can hold (99 KiB on sm_86 and sm_89)."""


@dataclass(frozen=True)
class Tile:
    """Launch choice: rows and depth of a tile, warps, and tiles in flight."""

    tokens: int
    depth: int
    warps: int
    stages: int


def default_tile(count: int, head_size: int, element_size: int = 2, rope: bool = True) -> Tile:
    """Tile by number of tokens: small batches read weights once, large ones fill tensor cores."""
    lanes = max(32, triton.next_power_of_2(head_size))
    # 128 rows of a 256-wide head spill registers on sm_90.
    tokens = FEW if count <= FEW else 64 if count <= MANY or lanes > 128 else 128
    depth = 64
    stage = (tokens + lanes) * depth * element_size
    # Without RoPE the compiler keeps the tiles of K's heads and of V's in memory side by side.
    stages = max(2, min(4, (_SHARED_BYTES if rope else _SHARED_BYTES // 2) // stage))
    return Tile(tokens, depth, 8 if tokens * lanes >= 128 * 128 else 4, stages)


def tile_for(count: int, arguments: dict[str, Any]) -> Tile:
    """Tile by number of tokens and what `epilogue_arguments` made of the layer."""
    head_size = max(arguments["DK"], arguments["DV"])
    return default_tile(count, head_size, rope=arguments["HAS_ROPE"])


@triton.jit
def _project_head(
    hidden,
    hidden_stride,
    weight,
    weight_stride,
    tokens,
    inside,
    depth,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Float32 sums of one head, split in pairs and rest; `weight` points at the head's first row.

    Weight rows outside the head are not masked but wrapped to row 0 of the head: their sums are
    never stored. Depth is masked on both sides, as 0 times an unread NaN would be NaN.
    """
    c_first, c_second, in_pairs = pair_columns(PAIRS, PAIRS_BLOCK, INTERLEAVED)
    c_first = tl.where(in_pairs, c_first, 0).to(tl.int64)
    c_second = tl.where(in_pairs, c_second, 0).to(tl.int64)
    k = tl.arange(0, DEPTH)
    row = tl.where(inside, tokens, 0).to(tl.int64)
    a = hidden + row[:, None] * hidden_stride + k[None, :]
    w_first = weight + c_first[None, :] * weight_stride + k[:, None]
    w_second = weight + c_second[None, :] * weight_stride + k[:, None]
    first = tl.zeros((TOKENS, PAIRS_BLOCK), dtype=tl.float32)
    second = tl.zeros((TOKENS, PAIRS_BLOCK), dtype=tl.float32)
    if REST_BLOCK > 0:
        c_rest = 2 * PAIRS + tl.arange(0, REST_BLOCK)
        c_rest = tl.where(c_rest < DIM, c_rest, 0).to(tl.int64)
        w_rest = weight + c_rest[None, :] * weight_stride + k[:, None]
        rest = tl.zeros((TOKENS, REST_BLOCK), dtype=tl.float32)
    else:
        rest = first
    for start in range(0, depth, DEPTH):
        left = depth - start
        x = tl.load(a + start, mask=k[None, :] < left, other=0.0)
        first = tl.dot(x, tl.load(w_first + start, mask=k[:, None] < left, other=0.0), first)
        second = tl.dot(x, tl.load(w_second + start, mask=k[:, None] < left, other=0.0), second)
        if REST_BLOCK > 0:
            rest = tl.dot(x, tl.load(w_rest + start, mask=k[:, None] < left, other=0.0), rest)
    # Wrapped lanes hold another column's sums; the norm adds up squares over all lanes.
    first = tl.where(in_pairs[None, :], first, 0.0)
    second = tl.where(in_pairs[None, :], second, 0.0)
    if REST_BLOCK > 0:
        in_rest = 2 * PAIRS + tl.arange(0, REST_BLOCK) < DIM
        rest = tl.where(in_rest[None, :], rest, 0.0)
    return first, second, rest


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["positions", "slots"])
def project_kv_kernel(
    hidden,
    hidden_stride,
    weight,
    weight_stride,
    depth,
    count,
    bias,
    norm_weight,
    eps,
    cache,
    cache_rows,
    cache_stride,
    positions,
    slots,
    k_pool,
    v_pool,
    pool_rows,
    k_stride,
    v_stride,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K_PAIRS: tl.constexpr,
    K_PAIRS_BLOCK: tl.constexpr,
    K_REST_BLOCK: tl.constexpr,
    V_PAIRS_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: one head of TOKENS rows. GROUP token tiles share a head's weights in L2."""
    tiles = tl.cdiv(count, TOKENS)
    span = GROUP * 2 * HEADS
    group = tl.program_id(0) // span
    height = min(tiles - group * GROUP, GROUP)
    index = tl.program_id(0) % span
    tokens = (group * GROUP + index % height) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < count
    head = index // height
    # fmt: off
    if head < HEADS:
        column = head * DK
        first, second, rest = _project_head(
            hidden, hidden_stride, weight + column.to(tl.int64) * weight_stride, weight_stride,
            tokens, inside, depth, DK, K_PAIRS, K_PAIRS_BLOCK, K_REST_BLOCK, INTERLEAVED,
            TOKENS, DEPTH)
        finish_head(
            first, second, rest, tokens, inside, bias + column, norm_weight, eps, cache,
            cache_rows, cache_stride, positions, slots, k_pool + column, pool_rows, k_stride,
            k_scale, DK, K_PAIRS, K_PAIRS_BLOCK, K_REST_BLOCK, HAS_BIAS, HAS_NORM, HAS_ROPE,
            INTERLEAVED, QUANTIZE, DTYPE)
    else:
        # Other names than above: both branches' values of one name must have one shape.
        target = (head - HEADS) * DV
        column = HEADS * DK + target
        v_first, v_second, v_rest = _project_head(
            hidden, hidden_stride, weight + column.to(tl.int64) * weight_stride, weight_stride,
            tokens, inside, depth, DV, DV // 2, V_PAIRS_BLOCK, 0, False,
            TOKENS, DEPTH)
        finish_head(
            v_first, v_second, v_rest, tokens, inside, bias + column, norm_weight, eps, cache,
            cache_rows, cache_stride, positions, slots, v_pool + target, pool_rows, v_stride,
            v_scale, DV, DV // 2, V_PAIRS_BLOCK, 0, HAS_BIAS, False, False,
            False, QUANTIZE, DTYPE)
    # fmt: on


def project_kv(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    epilogue: Epilogue,
    tile: Tile | None = None,
) -> None:
    """As `ops.project_kv`, for arguments that passed its checks; bfloat16 or float16.

    tile: launch choice; None takes `default_tile`.
    """
    count = hidden.shape[0]
    if count == 0:
        return
    arguments = epilogue_arguments(hidden, positions, slots, k_pool, v_pool, epilogue, 16)
    if tile is None:
        tile = tile_for(count, arguments)
    grid = (triton.cdiv(count, tile.tokens) * 2 * arguments["HEADS"],)
    project_kv_kernel[grid](
        hidden=hidden,
        hidden_stride=hidden.stride(0),
        weight=weight,
        weight_stride=weight.stride(0),
        depth=hidden.shape[1],
        **arguments,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        GROUP=8,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
