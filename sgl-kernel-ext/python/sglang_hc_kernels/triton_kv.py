"""K/V epilogue kernel: bias, k-norm, RoPE and the scatter into the paged pool.

A head is handled as two halves of pairs and a rest: with rotary dimensions the pairs are RoPE's,
otherwise column i and column i + dim / 2. So no value has to cross lanes, in either RoPE style.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_hc_kernels.contracts import FP8, Epilogue, require

_TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
_TILE_VALUES = 2048


@triton.jit
def pair_columns(PAIRS: tl.constexpr, PAIRS_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Columns of the first and second members, and which lanes hold a pair."""
    pair = tl.arange(0, PAIRS_BLOCK)
    if INTERLEAVED:
        first = pair * 2
        second = pair * 2 + 1
    else:
        first = pair
        second = pair + PAIRS
    return first, second, pair < PAIRS


@triton.jit
def _biased(values, bias, columns, mask, DTYPE: tl.constexpr, HAS_BIAS: tl.constexpr):
    values = values.to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)[None, :]
    return values.to(DTYPE).to(tl.float32)


@triton.jit
def _normed(values, inverse, weight, columns, mask, DTYPE: tl.constexpr):
    gain = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)[None, :]
    return (values * inverse[:, None] * gain).to(DTYPE).to(tl.float32)


@triton.jit
def _store(values, pool, rows, columns, mask, scale, DTYPE: tl.constexpr, QUANTIZE: tl.constexpr):
    if QUANTIZE:
        values = tl.div_rn(values, tl.full(values.shape, scale, tl.float32))
        values = values.to(DTYPE).to(tl.float32)
    target = pool + rows[:, None] + columns[None, :]
    tl.store(target, values.to(pool.dtype.element_ty), mask=mask)


@triton.jit
def finish_head(
    first,
    second,
    rest,
    tokens,
    inside,
    bias,
    norm_weight,
    eps,
    cache,
    cache_rows,
    cache_stride,
    positions,
    slots,
    pool,
    pool_rows,
    pool_stride,
    scale,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Everything after the projection for one head of a tile of tokens.

    bias and pool point at the head's first column. REST_BLOCK 0: the pairs are the whole head.
    """
    c_first, c_second, in_pairs = pair_columns(PAIRS, PAIRS_BLOCK, INTERLEAVED)
    first = _biased(first, bias, c_first, in_pairs, DTYPE, HAS_BIAS)
    second = _biased(second, bias, c_second, in_pairs, DTYPE, HAS_BIAS)
    if REST_BLOCK > 0:
        c_rest = 2 * PAIRS + tl.arange(0, REST_BLOCK)
        in_rest = c_rest < DIM
        rest = _biased(rest, bias, c_rest, in_rest, DTYPE, HAS_BIAS)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, axis=1)
        inverse = tl.rsqrt(squares / DIM + eps)
        first = _normed(first, inverse, norm_weight, c_first, in_pairs, DTYPE)
        second = _normed(second, inverse, norm_weight, c_second, in_pairs, DTYPE)
        if REST_BLOCK > 0:
            rest = _normed(rest, inverse, norm_weight, c_rest, in_rest, DTYPE)
    slot = tl.load(slots + tokens, mask=inside, other=-1)
    keep = inside & (slot >= 0) & (slot < pool_rows)
    if HAS_ROPE:
        position = tl.load(positions + tokens, mask=keep, other=-1)
        keep = keep & (position >= 0) & (position < cache_rows)
        lanes = keep[:, None] & in_pairs[None, :]
        angle = cache + position[:, None] * cache_stride + tl.arange(0, PAIRS_BLOCK)[None, :]
        cos = tl.load(angle, mask=lanes, other=0.0).to(tl.float32)
        sin = tl.load(angle + PAIRS, mask=lanes, other=0.0).to(tl.float32)
        turned = first * cos - second * sin
        second = (second * cos + first * sin).to(DTYPE).to(tl.float32)
        first = turned.to(DTYPE).to(tl.float32)
    rows = slot * pool_stride
    lanes = keep[:, None] & in_pairs[None, :]
    _store(first, pool, rows, c_first, lanes, scale, DTYPE, QUANTIZE)
    _store(second, pool, rows, c_second, lanes, scale, DTYPE, QUANTIZE)
    if REST_BLOCK > 0:
        lanes = keep[:, None] & in_rest[None, :]
        _store(rest, pool, rows, c_rest, lanes, scale, DTYPE, QUANTIZE)


@triton.jit
def _load_head(
    source,
    inside,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    c_first, c_second, in_pairs = pair_columns(PAIRS, PAIRS_BLOCK, INTERLEAVED)
    lanes = inside[:, None] & in_pairs[None, :]
    first = tl.load(source[:, None] + c_first[None, :], mask=lanes, other=0.0)
    second = tl.load(source[:, None] + c_second[None, :], mask=lanes, other=0.0)
    rest = first
    if REST_BLOCK > 0:
        c_rest = 2 * PAIRS + tl.arange(0, REST_BLOCK)
        lanes = inside[:, None] & (c_rest < DIM)[None, :]
        rest = tl.load(source[:, None] + c_rest[None, :], mask=lanes, other=0.0)
    return first, second, rest


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["positions", "slots"])
def kv_epilogue_kernel(
    kv,
    kv_stride,
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
):
    """One program: TOKENS rows of one head; heads 0..HEADS-1 are K's, the rest V's."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < count
    row = kv + tokens.to(tl.int64) * kv_stride
    head = tl.program_id(1)
    # fmt: off
    if head < HEADS:
        column = head * DK
        first, second, rest = _load_head(
            row + column, inside, DK, K_PAIRS, K_PAIRS_BLOCK, K_REST_BLOCK, INTERLEAVED)
        finish_head(
            first, second, rest, tokens, inside, bias + column, norm_weight, eps, cache,
            cache_rows, cache_stride, positions, slots, k_pool + column, pool_rows, k_stride,
            k_scale, DK, K_PAIRS, K_PAIRS_BLOCK, K_REST_BLOCK, HAS_BIAS, HAS_NORM, HAS_ROPE,
            INTERLEAVED, QUANTIZE, DTYPE)
    else:
        # Other names than above: both branches' values of one name must have one shape.
        target = (head - HEADS) * DV
        column = HEADS * DK + target
        v_first, v_second, v_rest = _load_head(
            row + column, inside, DV, DV // 2, V_PAIRS_BLOCK, 0, False)
        finish_head(
            v_first, v_second, v_rest, tokens, inside, bias + column, norm_weight, eps, cache,
            cache_rows, cache_stride, positions, slots, v_pool + target, pool_rows, v_stride,
            v_scale, DV, DV // 2, V_PAIRS_BLOCK, 0, HAS_BIAS, False, False,
            False, QUANTIZE, DTYPE)
    # fmt: on


def epilogue_arguments(
    like: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    epilogue: Epilogue,
    min_block: int = 1,
) -> dict[str, Any]:
    """Arguments of both kernels that the epilogue decides, by name.

    min_block: least lanes of a block, 16 where it is the side of a matrix product. Raises
    ArgumentError for an odd head size, which a split into pairs cannot hold.
    """
    heads, dk = k_pool.shape[1:]
    dv = v_pool.shape[2]
    require(dk % 2 == 0 and dv % 2 == 0, f"head sizes {dk} and {dv}: the kernels need even ones")
    rotary, norm, bias = epilogue.rotary, epilogue.k_norm, epilogue.bias
    pairs = (rotary.dim if rotary else dk) // 2
    rest = dk - 2 * pairs
    # An absent tensor still needs a pointer; any will do, the kernel does not read it. Its sizes
    # are always the same, because Triton compiles a kernel for each kind of number.
    cache = rotary.cos_sin_cache if rotary else like

    def block(size: int) -> int:
        return max(min_block, triton.next_power_of_2(size))

    return {
        "count": like.shape[0],
        "bias": like if bias is None else bias.contiguous(),
        "norm_weight": like if norm is None else norm.weight.contiguous(),
        "eps": 0.0 if norm is None else float(norm.eps),
        "cache": cache,
        "cache_rows": cache.shape[0] if rotary else 0,
        "cache_stride": cache.stride(0) if rotary else 0,
        "positions": positions,
        "slots": slots,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "pool_rows": k_pool.shape[0],
        "k_stride": k_pool.stride(0),
        "v_stride": v_pool.stride(0),
        "k_scale": float(epilogue.k_scale),
        "v_scale": float(epilogue.v_scale),
        "HEADS": heads,
        "DK": dk,
        "DV": dv,
        "K_PAIRS": pairs,
        "K_PAIRS_BLOCK": block(pairs),
        "K_REST_BLOCK": block(rest) if rest else 0,
        "V_PAIRS_BLOCK": block(dv // 2),
        "HAS_BIAS": bias is not None,
        "HAS_NORM": norm is not None,
        "HAS_ROPE": rotary is not None,
        "INTERLEAVED": bool(rotary and rotary.interleaved),
        "QUANTIZE": k_pool.dtype == FP8,
        "DTYPE": _TRITON_DTYPES[like.dtype],
    }


def kv_epilogue(
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    epilogue: Epilogue,
) -> None:
    """As `ops.kv_epilogue`, for arguments that passed its checks."""
    count = kv.shape[0]
    if count == 0:
        return
    arguments = epilogue_arguments(kv, positions, slots, k_pool, v_pool, epilogue)
    widest = triton.next_power_of_2(max(arguments["DK"], arguments["DV"]))
    # One tile whatever the count: another one for few rows would be another kernel to compile.
    tokens = max(1, _TILE_VALUES // widest)
    grid = (triton.cdiv(count, tokens), 2 * arguments["HEADS"])
    kv_epilogue_kernel[grid](kv=kv, kv_stride=kv.stride(0), **arguments, TOKENS=tokens, num_warps=4)
