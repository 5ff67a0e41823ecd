"""Rows of many layers into one tensor: one launch, source addresses from a device table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from sglang_hc_kernels.ops import PointerTable

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_MAX_WORDS_PER_PROGRAM = 1024


@triton.jit(
    do_not_specialize=["source_count", "layer_stride"],
    do_not_specialize_on_alignment=["slots", "staging"],
)
def gather_rows_kernel(
    source_table,
    slots,
    staging,
    source_count,
    source_stride,
    layer_stride,
    row_stride,
    row_words,
    WORD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK words of one row of one layer. Strides and `row_words` are in words.

    What differs from call to call, the place and size of `staging`, is not specialised on.
    """
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row)
    valid = (slot >= 0) & (slot < source_count)
    source = tl.load(source_table + layer).to(tl.pointer_type(WORD))
    target = staging.to(tl.pointer_type(WORD)) + layer * layer_stride + row * row_stride
    if WIDE:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (words < row_words) & valid
    data = tl.load(source + slot * source_stride + words, mask=mask)
    tl.store(target + words, data, mask=mask)


def gather_rows(pool: PointerTable, slots: torch.Tensor, staging: torch.Tensor) -> None:
    """As `ops.gather_rows`, for tensors on the device that runs the kernel."""
    count = slots.shape[0]
    if count == 0:
        return
    layer_stride, row_stride, _ = staging.stride()
    bits = pool.alignment_bits | staging.data_ptr() | layer_stride | row_stride
    word = next(size for size in _WORDS if bits % size == 0)
    row_words = pool.row_bytes // word
    block = min(triton.next_power_of_2(row_words), _MAX_WORDS_PER_PROGRAM)
    grid = (count, triton.cdiv(row_words, block), len(pool.buffers))
    gather_rows_kernel[grid](
        pool.addresses,
        slots,
        staging,
        pool.rows,
        pool.stride_bytes // word,
        layer_stride // word,
        row_stride // word,
        row_words,
        WORD=_WORDS[word],
        WIDE=bits % 16 == 0,
        BLOCK=block,
        num_warps=max(1, min(8, block // 128)),
    )
