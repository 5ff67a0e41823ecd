"""Which of SGLang's pools with sliding windows are taken, in the shapes of published models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_hc.srt.binding import parallel
from sglang_hc.srt.model.kv_pool import UnsupportedPool, draft_pool
from sglang_hc.srt.model.window_pool import WindowPool, full_attention, window_pool

FULL, WINDOWS = [3, 7], [0, 1, 2, 4, 5, 6]

MIMO_V2: dict[str, Any] = dict(
    head_num=4, head_dim=192, v_head_dim=128, swa_head_num=8, swa_head_dim=192, swa_v_head_dim=128
)
LATENTS: dict[str, Any] = dict(
    head_num=0, head_dim=0, full_kv_pool_class=MLATokenToKVPool,
    swa_kv_pool_class=MLATokenToKVPool,
    **{
        f"{kind}_kv_pool_kwargs": dict(
            page_size=1, device="cpu", enable_memory_saver=False, kv_lora_rank=64,
            qk_rope_head_dim=32,
        )
        for kind in ("full", "swa")
    },
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "pp_size", lambda: 1)


def pool_of(full: list[int] = FULL, windows: list[int] = WINDOWS, **options: Any) -> SWAKVPool:
    return SWAKVPool(
        128, 64, 1, torch.bfloat16, swa_attention_layer_ids=windows, full_attention_layer_ids=full,
        device="cpu", enable_memory_saver=False, **options,
    )  # fmt: skip


def windows_of(pool: SWAKVPool, page: int = 1) -> WindowPool:
    allocator = SWATokenToKVPoolAllocator(
        128, 64, page, torch.bfloat16, "cpu", pool, need_sort=False
    )
    found = window_pool(pool, allocator, 128, page)
    assert found is not None
    return found


def test_each_kind_of_layer_has_heads_of_its_own() -> None:
    """MiMo-V2 has twice as many for the windows, and values are narrower than keys."""
    pool = pool_of(**MIMO_V2)
    found = windows_of(pool)
    assert (found.full, found.layers) == (tuple(FULL), tuple(WINDOWS))
    assert found.rows.part_bytes == (8 * 192 * 2, 8 * 128 * 2)
    assert found.layout.window.parts == found.rows.part_bytes and found.layout.blocks == 2
    own = full_attention(pool)
    assert own.k_buffer[0].shape[1:] == (4, 192) and own.v_buffer[0].shape[1:] == (4, 128)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(MIMO_V2, full=[]), "layers with full attention and with windows"),
        (dict(MIMO_V2, windows=[]), "layers with full attention and with windows"),
        (LATENTS, "latent attention"),
    ],
    ids=["windows alone", "no window", "latents"],
)
def test_others_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedPool, match=why):
        windows_of(pool_of(**options))


def test_a_page_of_more_than_a_block_is_refused() -> None:
    with pytest.raises(UnsupportedPool, match="--page-size 128"):
        windows_of(pool_of(**MIMO_V2), page=128)


def test_a_plain_pool_has_no_windows() -> None:
    pool = MHATokenToKVPool(
        size=4, page_size=1, dtype=torch.float32, head_num=1, head_dim=4, layer_num=1,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    assert window_pool(pool, None, 128, 1) is None and full_attention(pool) is pool


def test_a_draft_model_with_windows_of_its_own_is_refused() -> None:
    assert draft_pool(None, eagle=False) is None
    for eagle in (False, True):
        with pytest.raises(UnsupportedPool, match="--speculative-draft-model-path"):
            draft_pool(pool_of(**MIMO_V2), eagle)
