"""Which of SGLang's KV pools can be read and written as rows."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

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


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 1152), (torch.float8_e4m3fn, 576)], ids=["16", "8 bits"]
)
def test_latent_rows_of_the_published_shape_come_back_elsewhere(
    dtype: torch.dtype, width: int
) -> None:
    """DeepSeek-V3's: 512 elements of the latent and 64 of the rotated key."""
    pool = MLATokenToKVPool(
        size=192, page_size=64, dtype=dtype, kv_lora_rank=512, qk_rope_head_dim=64, layer_num=2,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    raw = [buffer.flatten(1).view(torch.uint8) for buffer in pool.kv_buffer]
    for rows in raw:
        rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8))
    whole = KvPoolRows(pool, None)
    assert whole.part_bytes == (width,)
    source, target = torch.tensor([64, 70, 255]), torch.tensor([1, 130, 64])
    saved = torch.zeros((2, 3, width), dtype=torch.uint8)
    whole.gather([0, 1], source, [saved], 0)
    before = raw[1].clone()
    whole.write_kv(1, [saved[1]], target)
    before[target] = before[source]
    assert torch.equal(raw[1], before) and torch.equal(saved[0], raw[0][source])
