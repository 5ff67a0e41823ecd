"""Row copies between buffers of many layers: one launch, addresses from a device table."""

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
    do_not_specialize=["source_count", "target_count"],
    do_not_specialize_on_alignment=["source_rows", "target_rows"],
)
def copy_rows_kernel(
    source_table,
    source_rows,
    target_table,
    target_rows,
    source_count,
    target_count,
    source_stride,
    target_stride,
    row_words,
    WORD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK words of one row of one layer. Strides and `row_words` are in words."""
    row = tl.program_id(0)
    layer = tl.program_id(2)
    source_row = tl.load(source_rows + row)
    target_row = tl.load(target_rows + row)
    valid = (source_row >= 0) & (source_row < source_count)
    valid = valid & (target_row >= 0) & (target_row < target_count)
    source = tl.load(source_table + layer).to(tl.pointer_type(WORD))
    target = tl.load(target_table + layer).to(tl.pointer_type(WORD))
    if WIDE:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (words < row_words) & valid
    data = tl.load(source + source_row * source_stride + words, mask=mask)
    tl.store(target + target_row * target_stride + words, data, mask=mask)


def copy_rows(
    source: PointerTable, source_rows: torch.Tensor, target: PointerTable, target_rows: torch.Tensor
) -> None:
    """As `reference.copy_rows`, for tables on the device that runs the kernel."""
    count = source_rows.shape[0]
    if count == 0:
        return
    bits = source.alignment_bits | target.alignment_bits
    word = next(size for size in _WORDS if bits % size == 0)
    row_words = source.row_bytes // word
    block = min(triton.next_power_of_2(row_words), _MAX_WORDS_PER_PROGRAM)
    grid = (count, triton.cdiv(row_words, block), len(source.buffers))
    copy_rows_kernel[grid](
        source.addresses,
        source_rows,
        target.addresses,
        target_rows,
        source.rows,
        target.rows,
        source.stride_bytes // word,
        target.stride_bytes // word,
        row_words,
        WORD=_WORDS[word],
        WIDE=bits % 16 == 0,
        BLOCK=block,
        num_warps=max(1, min(8, block // 128)),
    )
