"""The index of sparse attention in SGLang's pool (DeepSeek-V3.2, GLM-5): of each token and layer a
key of 8 bits an element and its scale, by which later tokens choose those that they attend to.

A layer's index is a buffer of pages: the keys of a page's 64 tokens, then their scales. Read as
rows as wide as a key, or as a scale, it holds those of a page at consecutive rows, and pages at a
fixed distance. So each is a part of the layer's KV rows, at other rows than their slots' numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.model_config import get_dsa_index_head_dim, is_deepseek_dsa
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from sglang_hc.device.gather_scatter import Places
from sglang_hc.forms import index_parts


def parts_of_model(config: Any) -> tuple[int, ...]:
    """Bytes of a token's key and scale in one layer, none without an index. config: SGLang's
    `ModelConfig`."""
    if not is_deepseek_dsa(config.hf_config):
        return ()
    return index_parts(get_dsa_index_head_dim(config.hf_config))


def unsupported(pool: DSATokenToKVPool) -> str | None:
    """Why the index is not one key of each token in each layer, in pages as above; None where it
    is. For users."""
    width = sum(index_parts(pool.index_head_dim))
    if torch.version.hip is not None:
        return "on AMD GPUs SGLang keeps the sparse-attention index in another order"
    if pool.index_kpool > 1:
        return "one key of the sparse-attention index stands for several tokens"
    if any(one.shape[1] != pool.index_page_size * width for one in _pages(pool)):
        return "the pages of the sparse-attention index are not those of its keys"
    return None


def index_buffers(pool: DSATokenToKVPool) -> list[list[torch.Tensor]]:
    """Per layer its keys and its scales, (rows, bytes) uint8 views; without rows in a layer that
    attends to what the index of another one chooses."""
    parts = index_parts(pool.index_head_dim)
    return [
        [one.view(len(one) * one.shape[1] // width, width) for width in parts]
        for one in _pages(pool)
    ]


def _pages(pool: DSATokenToKVPool) -> list[torch.Tensor]:
    """Per layer (pages, bytes) uint8."""
    pages: list[torch.Tensor] = pool.index_k_with_scale_buffer
    return pages


def index_places(pool: DSATokenToKVPool) -> list[Places]:
    """Where the key and the scale of a slot lie in the views of `index_buffers`."""
    page = pool.index_page_size
    places, before = [], 0
    for width in (parts := index_parts(pool.index_head_dim)):
        places.append(Places(page, page * sum(parts) // width, page * before // width))
        before += width
    return places
