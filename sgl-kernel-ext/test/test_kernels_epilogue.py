from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kernel_cases import FP8, FP8_RUNS, Case, cases, close, examples
from sglang_hc_kernels import ArgumentError, Epilogue, Rotary, ops, reference, triton_kv

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def strided_kv(case: Case, generator: torch.Generator, device: str) -> torch.Tensor:
    """K and V as the tail of a wider QKV output."""
    whole = torch.randn(case.count, case.width + 5, generator=generator) * 2
    return whole.to(case.dtype).to(device)[:, 5:]


@settings(max_examples=examples(40), deadline=None)
@given(case=cases(DTYPES))
def test_kernel_agrees_with_the_reference(case: Case, device: str) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    kv = strided_kv(case, generator, device)
    epilogue = case.epilogue(generator, device)
    positions, slots, size = case.places(generator, device)
    inputs = [kv, positions, slots]
    before = [tensor.clone() for tensor in inputs]
    expected = case.pools(size, device)
    actual = case.pools(size, device)
    reference.kv_epilogue(kv, positions, slots, *expected, epilogue)
    triton_kv.kv_epilogue(kv, positions, slots, *actual, epilogue)
    for mine, theirs in zip(actual, expected, strict=True):
        exact = not case.norm and not case.rotary_dim
        close(mine, theirs, steps=1 if mine.dtype != torch.float32 else 4)
        if exact and device == "cpu":
            assert torch.equal(mine.float(), theirs.float())
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_few_bf16_values_differ_and_only_by_one_step(device: str) -> None:
    case = Case(64, 2, 64, 64, 64, False, True, True, False, torch.bfloat16, 1)
    generator = torch.Generator().manual_seed(1)
    kv = strided_kv(case, generator, device)
    epilogue = case.epilogue(generator, device)
    positions, slots, size = case.places(generator, device)
    expected, actual = case.pools(size, device), case.pools(size, device)
    reference.kv_epilogue(kv, positions, slots, *expected, epilogue)
    triton_kv.kv_epilogue(kv, positions, slots, *actual, epilogue)
    close(actual[0], expected[0], steps=1, share=0.02)
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_reference_rope_is_a_rotation_of_complex_pairs(interleaved: bool) -> None:
    torch.manual_seed(0)
    angles = torch.rand(16, 4) * 6
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    x = torch.randn(5, 2, 12)
    positions = torch.tensor([0, 3, 3, 15, 7])
    out = reference.rotate(x, positions, Rotary(cache, interleaved))
    real, imaginary = (
        (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    )
    turned = torch.complex(x[..., real], x[..., imaginary]) * torch.polar(
        torch.ones(5, 1, 4), angles[positions].unsqueeze(1)
    )
    torch.testing.assert_close(out[..., real], turned.real)
    torch.testing.assert_close(out[..., imaginary], turned.imag)
    assert torch.equal(out[..., 8:], x[..., 8:])


def test_reference_norm_is_torch_rms_norm() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 3, 16), torch.randn(16)
    expected = torch.nn.functional.rms_norm(x, (16,), weight, 1e-5)
    torch.testing.assert_close(reference.rms_norm(x, reference.KNorm(weight, 1e-5)), expected)


@pytest.mark.skipif(not FP8_RUNS, reason="this GPU has no fp8 (before compute capability 8.9)")
def test_fp8_saturates_and_keeps_nan(device: str) -> None:
    kv = torch.tensor([[1e4, -1e4, float("nan"), 2.0]], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    for implementation in (reference.kv_epilogue, triton_kv.kv_epilogue):
        k, v = (torch.zeros(1, 1, 2, device=device).to(FP8) for _ in range(2))
        implementation(kv, zero, zero, k, v, Epilogue())
        assert k.float().flatten().tolist() == [448.0, -448.0]
        assert v.float().flatten()[0].isnan() and v.float().flatten()[1] == 2.0


def test_kernel_leaves_rows_past_the_end_unwritten(device: str) -> None:
    kv = torch.ones(3, 4, device=device)
    cache = torch.ones(4, 2, device=device)
    k, v = torch.zeros(2, 1, 2, device=device), torch.zeros(2, 1, 2, device=device)
    positions = torch.tensor([0, 1, 9], device=device)
    slots = torch.tensor([1, 5, 0], device=device)
    triton_kv.kv_epilogue(kv, positions, slots, k, v, Epilogue(rotary=Rotary(cache)))
    assert k[0].abs().sum() == 0 and k[1].abs().sum() > 0


def test_cpu_dispatch_is_the_reference_and_raises_past_the_end() -> None:
    kv, k, v = torch.ones(1, 4), torch.zeros(2, 1, 2), torch.zeros(2, 1, 2)
    zero = torch.zeros(1, dtype=torch.int64)
    ops.kv_epilogue(kv, zero, zero + 1, k, v)
    assert k[1].eq(1).all() and v[1].eq(1).all() and k[0].eq(0).all()
    with pytest.raises(IndexError):
        ops.kv_epilogue(kv, zero, zero + 2, k, v)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kv": torch.ones(1, 5)}, "width"),
        ({"kv": torch.ones(1, 4, dtype=torch.float64)}, "dtype"),
        ({"slots": torch.zeros(1, dtype=torch.int32)}, "slots"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions"),
        ({"k_pool": torch.zeros(2, 1, 2, dtype=torch.float16)}, "k_pool"),
        ({"v_pool": torch.zeros(3, 1, 2)}, "agree"),
        ({"k_pool": torch.zeros(2, 1, 4)[..., ::2]}, "contiguous"),
        ({"epilogue": Epilogue(bias=torch.ones(3))}, "bias"),
        ({"epilogue": Epilogue(k_norm=reference.KNorm(torch.ones(4), 1e-6))}, "k_norm"),
        ({"epilogue": Epilogue(rotary=Rotary(torch.ones(2, 4)))}, "rot_dim"),
        ({"epilogue": Epilogue(k_scale=0.0)}, "positive"),
    ],
)
def test_bad_arguments_name_the_argument(change: dict[str, object], word: str) -> None:
    index = torch.zeros(1, dtype=torch.int64)
    arguments: dict[str, object] = {
        "kv": torch.ones(1, 4),
        "positions": index,
        "slots": index,
        "k_pool": torch.zeros(2, 1, 2),
        "v_pool": torch.zeros(2, 1, 2),
    }
    arguments.update(change)
    with pytest.raises(ArgumentError, match=word):
        ops.kv_epilogue(**arguments)  # type: ignore[arg-type]
