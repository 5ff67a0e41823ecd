"""SGLang's pool of a model with sparse attention, in the published model's own shape."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from support.sparse_kernels import DIM, PAGE

PAGES, LAYERS = 5, 3


def pool_of(
    dtype: torch.dtype = torch.bfloat16, width: int = 576, layers: int = LAYERS, **options: Any
) -> DSATokenToKVPool:
    """DeepSeek-V3.2's latents of `width` elements, with bytes in it that differ everywhere."""
    shape: dict[str, Any] = dict(
        size=(PAGES - 1) * PAGE, page_size=PAGE, dtype=dtype, kv_lora_rank=512,
        qk_rope_head_dim=64, layer_num=layers, device="cpu", index_head_dim=DIM,
        enable_memory_saver=False, kv_cache_dim=width,
    )  # fmt: skip
    with get_parallel().override(attn_dcp_size=1):
        pool = DSATokenToKVPool(**shape | options)
    generator = torch.Generator().manual_seed(layers)
    for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return pool
