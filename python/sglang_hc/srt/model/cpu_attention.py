"""Prefill attention on a CPU that does work for the new tokens only.

SGLang's torch_native backend pads the query with rows for the cached prefix and throws their result
away: a turn of 20 new tokens after 2,000 cached ones costs as much attention as recomputing all of
it, which hides what a prefix cache saves. This computes the same values without those rows. It is
in place with and without the tiers, so that a comparison with plain SGLang compares the tiers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

ROWS = 1024
"""Rows of one attention behind a prefix. Fewer are slower: torch takes larger blocks from 768 on,
though more would compute more of what the mask hides."""


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
        attended = _attend(
            *(part.transpose(0, 1).unsqueeze(0) for part in (rows, k, v)),
            prefix,
            scale=options.get("scaling"),
            enable_gqa=bool(options.get("enable_gqa")),
        )
        for first, result in attended:
            at = start + first
            output[at : at + result.shape[2]] = result.squeeze(0).transpose(0, 1)
        start += new
    return output


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: int, **options: Any
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, its and the next rows' attention); all are (1, heads, tokens, head dim).

    Behind a prefix at most ROWS rows run at a time, and see no token behind their last one: torch
    computes what a mask hides, and only without a prefix does it know better.
    """
    if not prefix:
        yield 0, scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        return
    for first in range(0, q.shape[2], ROWS):
        rows = q[:, :, first : first + ROWS]
        count = rows.shape[2]
        seen = prefix + first + count
        mask = _CAUSAL.mask(count, seen, q.dtype)
        yield (
            first,
            scaled_dot_product_attention(
                rows, k[:, :, :seen], v[:, :, :seen], attn_mask=mask, **options
            ),
        )


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


class _Causal:
    """Additive masks. One is kept, so that not each layer of a pass makes its own: ROWS numbers for
    a token of the longest context, and a quarter more to grow into. A smaller one is its last rows
    and columns."""

    def __init__(self) -> None:
        self._mask = torch.empty((0, 0))

    def mask(self, new: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """(new, length): the i-th of the last `new` tokens sees the tokens up to itself."""
        rows, columns = self._mask.shape
        if new > rows or length > columns or dtype != self._mask.dtype:
            rows, columns = max(new, rows), max(length * 5 // 4, columns)
            hidden = torch.ones((rows, columns), dtype=torch.bool).triu(columns - rows + 1)
            zeros = torch.zeros((rows, columns), dtype=dtype)
            self._mask = zeros.masked_fill_(hidden, float("-inf"))
            rows, columns = self._mask.shape
        return self._mask[rows - new :, columns - length :]


_CAUSAL = _Causal()
