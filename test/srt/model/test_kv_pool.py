"""Which of SGLang's KV pools can be read and written as rows."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_hc.srt.model.kv_pool import KvPoolRows, UnsupportedPool


def test_a_pool_with_scales_beside_its_rows_is_refused() -> None:
    """Its rows would have come back under the scales of whoever had the slots meanwhile."""
    pool = MHATokenToKVPool(
        size=4, page_size=1, dtype=torch.float32, head_num=1, head_dim=4, layer_num=1,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    KvPoolRows(pool, None)
    pool.quant_method = object()  # as `--kv-cache-dtype fp4_e2m1` has SGLang make it on a GPU
    with pytest.raises(UnsupportedPool, match="--kv-cache-dtype fp4_e2m1"):
        KvPoolRows(pool, None)
