from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import Case, cases, close, examples
from sglang_hc_kernels import ArgumentError, Epilogue, ops, reference, triton_project
from sglang_hc_kernels.triton_project import Tile, default_tile


def oracle(
    hidden: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue
) -> tuple[torch.Tensor, Epilogue]:
    """Projection in float32 rounded once, and what is left of the epilogue."""
    bias = None if epilogue.bias is None else epilogue.bias.float()
    kv = F.linear(hidden.float(), weight.float(), bias).to(hidden.dtype)
    rest = Epilogue(None, epilogue.k_norm, epilogue.rotary, epilogue.k_scale, epilogue.v_scale)
    return kv, rest


def check(case: Case, depth: int, device: str, tile: Tile | None, share: float) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    hidden = torch.randn(case.count, depth + 3, generator=generator).to(case.dtype).to(device)
    hidden = hidden[:, :depth]
    weight = torch.randn(case.width, depth, generator=generator) / depth**0.5
    weight = weight.to(case.dtype).to(device)
    epilogue = case.epilogue(generator, device)
    positions, slots, size = case.places(generator, device)
    kv, rest = oracle(hidden, weight, epilogue)
    expected, actual = case.pools(size, device), case.pools(size, device)
    reference.kv_epilogue(kv, positions, slots, *expected, rest)
    before = hidden.clone(), weight.clone()
    triton_project.project_kv(hidden, weight, positions, slots, *actual, epilogue, tile)
    for mine, theirs in zip(actual, expected, strict=True):
        # One step from the sum's rounding, carried through norm and RoPE, and theirs.
        close(mine, theirs, steps=3, share=share)
    assert torch.equal(hidden, before[0]) and torch.equal(weight, before[1])


@settings(max_examples=examples(25), deadline=None)
@given(case=cases((torch.bfloat16, torch.float16)), depth=st.integers(1, 80))
def test_fused_projection_agrees_with_the_reference(case: Case, depth: int, device: str) -> None:
    check(case, depth, device, None, share=1.0)


@pytest.mark.parametrize("rotary_dim", [0, 16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_values_differ_over_many_tiles(
    rotary_dim: int, dtype: torch.dtype, device: str
) -> None:
    case = Case(70, 2, 32, 48, rotary_dim, False, True, True, False, dtype, 5)
    check(case, 80, device, Tile(32, 64, 4, 2), share=0.02)


def test_a_nan_beyond_a_row_does_not_leak(device: str) -> None:
    """Depth is masked on both operands: memory behind a strided row may hold anything."""
    hidden = torch.full((4, 64), float("nan"), dtype=torch.bfloat16, device=device)
    hidden[:, :24] = 1.0
    weight = torch.full((32, 64), float("nan"), dtype=torch.bfloat16, device=device)
    weight[:, :24] = 1.0
    index = torch.arange(4, device=device)
    k, v = (torch.zeros(4, 1, 16, dtype=torch.bfloat16, device=device) for _ in range(2))
    triton_project.project_kv(hidden[:, :24], weight[:, :24], index, index, k, v, Epilogue())
    assert k.eq(24).all() and v.eq(24).all()


@pytest.mark.parametrize("count", [1, 16, 17, 512, 513, 16384])
@pytest.mark.parametrize("head_size", [32, 64, 80, 128, 192, 256])
def test_default_tile_fits_every_supported_gpu(count: int, head_size: int) -> None:
    tile = default_tile(count, head_size)
    lanes = max(32, 1 << (head_size - 1).bit_length())
    assert tile.stages * (tile.tokens + lanes) * tile.depth * 2 <= 99 * 1024
    assert tile.stages >= 2


def test_dispatch_agrees_with_projection_then_epilogue(device: str) -> None:
    case = Case(9, 2, 16, 16, 8, True, True, True, False, torch.float32, 3)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(9, 20, generator=generator).to(device)
    weight = torch.randn(case.width, 20, generator=generator).to(device)
    epilogue = case.epilogue(generator, device)
    positions, slots, size = case.places(generator, device)
    kv, rest = oracle(hidden, weight, epilogue)
    expected, actual = case.pools(size, device), case.pools(size, device)
    reference.kv_epilogue(kv, positions, slots, *expected, rest)
    ops.project_kv(hidden, weight, positions, slots, *actual, epilogue=epilogue)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_weight_of_another_depth_is_named() -> None:
    index = torch.zeros(1, dtype=torch.int64)
    pool = torch.zeros(2, 1, 2)
    with pytest.raises(ArgumentError, match="weight"):
        ops.project_kv(torch.ones(1, 4), torch.ones(4, 5), index, index, pool, pool.clone())
