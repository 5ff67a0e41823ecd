"""States of recurrent layers in SGLang's own pool, in the published shapes of Qwen3-Next and Kimi
Linear but for the number of layers: what is read of a slot is its bytes in all layers, and of no
other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.memory_pool import MambaPool

from sglang_hc.forms import EndLayout
from sglang_hc.srt.model.kv_pool import UnsupportedPool
from sglang_hc.srt.model.state_pool import StatePool
from sglang_hc.store.host_pool import EndPool

LAYERS = [0, 1, 2, 4]
SLOTS = 5

Model = Callable[[Mamba2StateDType], Any]
"""SGLang's parameters of a model's states."""


def qwen3_next(dtype: Mamba2StateDType) -> Mamba2CacheParams:
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=4096, n_groups=16, num_heads=32, head_dim=128,
        state_size=128, conv_kernel=4,
    )  # fmt: skip
    return Mamba2CacheParams(layers=LAYERS, shape=shape, dtype=dtype)


def kimi_linear(dtype: Mamba2StateDType) -> KimiLinearCacheParams:
    """Its convolutions keep channels last."""
    shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=32, head_dim=128)
    return KimiLinearCacheParams(layers=LAYERS, shape=shape, dtype=dtype)


def pool_of(
    conv: torch.dtype = torch.bfloat16, model: Model = qwen3_next, **options: Any
) -> MambaPool:
    """With bytes in it that differ everywhere."""
    params = model(Mamba2StateDType(conv=conv, temporal=torch.float32))
    pool = MambaPool(
        size=SLOTS, spec_state_size=SLOTS, cache_params=params, mamba_layer_ids=LAYERS,
        device="cpu", **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    for part in (*pool.mamba_cache.conv, pool.mamba_cache.temporal):
        raw = part.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return pool


def bytes_of(pool: MambaPool, slot: int) -> list[torch.Tensor]:
    """(layers, bytes) of each part of a state."""
    parts = (*pool.mamba_cache.conv, pool.mamba_cache.temporal)
    return [part[:, slot].flatten(1).view(torch.uint8).clone() for part in parts]


@pytest.mark.parametrize("conv", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", [qwen3_next, kimi_linear])
def test_a_state_leaves_and_comes_back(model: Model, conv: torch.dtype) -> None:
    pool = pool_of(conv, model)
    states = StatePool(pool)
    assert states.layers.layers == tuple(LAYERS)
    host = EndPool(states.layout, 3)
    rows = [torch.from_numpy(part) for part in host.state]
    before = [bytes_of(pool, slot) for slot in range(SLOTS + 1)]
    states.read(torch.tensor([2]))([part[1] for part in rows], 0, 0, 1)
    for mine, wanted in zip(rows, before[2], strict=True):
        assert torch.equal(mine[1, :, 0], wanted)
        assert not mine[0].any() and not mine[2].any()
    states.write([part[1] for part in rows], torch.tensor([4]))
    for slot in range(SLOTS + 1):
        wanted = before[2 if slot == 4 else slot]
        assert all(map(torch.equal, bytes_of(pool, slot), wanted))


@pytest.mark.parametrize("model", [qwen3_next, kimi_linear])
def test_all_of_a_state_is_kept(model: Model) -> None:
    """As many bytes as SGLang counts for a request, and the padding of each layer."""
    pool = pool_of(model=model)
    states = StatePool(pool)
    kept = sum(states.layers.parts) * len(LAYERS)
    assert kept * (SLOTS + 1) == pool.mamba_cache.mem_usage_bytes()
    assert EndLayout(state=states.layers).slot_bytes < 1.01 * kept


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"enable_linear_replayssm": True}, "steps that are not in it yet"),
        ({"speculative_num_draft_tokens": 3, "enable_linear_replayssm_spec": True}, "steps that"),
    ],
)
def test_a_pool_with_more_to_a_state_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedPool, match=why):
        StatePool(pool_of(**options))


def test_state_beside_that_of_recurrent_layers_is_refused() -> None:
    pool = pool_of()
    pool.register_slot_state(object())
    with pytest.raises(UnsupportedPool, match="other state beside"):
        StatePool(pool)
