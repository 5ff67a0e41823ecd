"""Prefill attention on a CPU that does work for the new tokens only.

SGLang's torch_native backend pads the query with rows for the cached prefix and throws their result
away: a turn of 20 new tokens after 2,000 cached ones costs as much attention as recomputing all of
it, which hides what a prefix cache saves. This computes the same values without those rows. It is
in place with and without the tiers, so that a comparison with plain SGLang compares the tiers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def extend(
    original: Callable[..., torch.Tensor],
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """AROUND TorchNativeAttnBackend._run_sdpa_forward_extend.

    query, output: (new tokens, heads, head dim) of all requests in a row; k_cache, v_cache: (slots,
    KV heads, dim). Anything but plain causal self-attention goes to SGLang's own.
    """
    window = options.get("sliding_window_size")
    plain = options.get("causal") and not options.get("is_cross_attn")
    if not plain or encoder_lens is not None or (window is not None and window > -1):
        return original(
            self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
            extend_prefix_lens, extend_seq_lens, encoder_lens, **options,
        )  # fmt: skip
    start = 0
    lengths = zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_prefix_lens.tolist(), strict=True
    )
    for request, length, prefix in lengths:
        new = length - prefix
        slots = req_to_token[request, :length]
        rows = query[start : start + new]
        k = _KEYS.rows(k_cache, slots).to(rows.dtype)
        v = _VALUES.rows(v_cache, slots).to(rows.dtype)
        result = scaled_dot_product_attention(
            rows.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=_causal(new, length, rows.dtype) if prefix else None,
            is_causal=prefix == 0,
            scale=options.get("scaling"),
            enable_gqa=bool(options.get("enable_gqa")),
        )
        output[start : start + new] = result.squeeze(0).transpose(0, 1)
        start += new
    return output


class _Gathered:
    """Memory for one layer's rows of a context. It is kept, because the system clears the pages of
    new memory, and would do so in every layer."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def rows(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The rows of `slots`, valid until the next call."""
        source = cache.view(torch.uint8)  # there are types of 8 bits that cannot be selected
        shape = (len(slots), *source.shape[1:])
        needed = math.prod(shape)
        if self._memory.numel() < needed:
            with torch.inference_mode(False):  # else nobody may write it outside that mode
                self._memory = torch.empty(needed * 5 // 4, dtype=torch.uint8)
        found = self._memory[:needed].view(shape)
        return torch.index_select(source, 0, slots, out=found).view(cache.dtype)


_KEYS, _VALUES = _Gathered(), _Gathered()


def _causal(new: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """(new, length) additive mask: new token i sees the prefix and new tokens up to i."""
    hidden = torch.ones((new, length), dtype=torch.bool).triu(length - new + 1)
    return torch.zeros((new, length), dtype=dtype).masked_fill_(hidden, float("-inf"))
