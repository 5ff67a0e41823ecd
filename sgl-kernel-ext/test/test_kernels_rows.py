from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import examples
from sglang_hc_kernels import ArgumentError, ops, reference, triton_rows
from sglang_hc_kernels.ops import PointerTable


def random_bytes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@settings(max_examples=examples(40), deadline=None)
@given(
    layers=st.integers(1, 3),
    count=st.integers(0, 12),
    row=st.one_of(st.integers(1, 70), st.sampled_from([64, 128, 1032, 9000])),
    padding=st.sampled_from([0, 1, 8, 16]),
    seed=st.integers(0, 2**31),
)
def test_kernel_moves_exactly_the_named_rows(
    layers: int, count: int, row: int, padding: int, seed: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = count + 4
    sources = [
        random_bytes(generator, size, row + padding).to(device)[:, :row] for _ in "a" * layers
    ]
    before = [random_bytes(generator, size, row).to(device) for _ in range(layers)]
    source_rows = torch.randint(-2, size + 1, (count,), generator=generator).to(device)
    target_rows = torch.randperm(size + 1, generator=generator)[:count].to(device)
    target_rows[torch.rand(count, generator=generator) < 0.2] = -1
    targets = [tensor.clone() for tensor in before]
    triton_rows.copy_rows(PointerTable(sources), source_rows, PointerTable(targets), target_rows)
    # Rows past the end are skipped by the kernel and refused by the reference.
    inside = (source_rows < size) & (target_rows < size)
    reference.copy_rows(sources, source_rows[inside], before, target_rows[inside])
    for mine, theirs in zip(targets, before, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_pool_to_staging_and_back(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = [torch.randn(10, 2, 8, generator=generator).to(dtype).to(device) for _ in range(3)]
    slots = torch.tensor([7, -1, 0, 3], device=device)
    row = 16 * pool[0].element_size()
    staging = torch.zeros(3, 5, row, dtype=torch.uint8, device=device)
    ops.gather_rows(pool, slots, staging)
    for layer in range(3):
        for place, slot in ((0, 7), (2, 0), (3, 3)):
            kept = pool[layer][slot].flatten().view(torch.uint8)
            assert torch.equal(staging[layer, place], kept)
        assert staging[layer, 1].eq(0).all() and staging[layer, 4].eq(0).all()
    back = [torch.zeros(10, 2, 8, device=device).to(dtype) for _ in range(3)]
    ops.scatter_rows(staging, slots, PointerTable(back))
    for layer in range(3):
        for slot in range(10):
            want = pool[layer][slot].float() if slot in (0, 3, 7) else torch.zeros(2, 8)
            assert torch.equal(back[layer][slot].float().cpu(), want.float().cpu())


def test_a_slot_past_the_end_is_an_error_on_cpu() -> None:
    with pytest.raises(IndexError):
        ops.gather_rows(torch.ones(1, 2, 4), torch.tensor([2]), torch.ones(1, 2, 4))


@pytest.mark.parametrize(
    ("pool", "slots", "staging", "word"),
    [
        (torch.ones(1, 2, 4), torch.tensor([0]), torch.ones(2, 2, 4), "buffers"),
        (torch.ones(1, 2, 4), torch.tensor([0]), torch.ones(1, 2, 5), "bytes a row"),
        (torch.ones(1, 2, 4), torch.tensor([0, 1, 0]), torch.ones(1, 2, 4), "staging"),
        (torch.ones(1, 2, 4), torch.tensor([0], dtype=torch.int32), torch.ones(1, 2, 4), "slots"),
        (torch.ones(1, 4, 2).transpose(1, 2), torch.tensor([0]), torch.ones(1, 2, 4), "contiguous"),
        ([torch.ones(2, 4), torch.ones(3, 4)], torch.tensor([0]), torch.ones(2, 2, 4), "one shape"),
        ([], torch.tensor([0]), torch.ones(1, 2, 4), "at least one"),
    ],
)
def test_bad_arguments_name_the_argument(
    pool: torch.Tensor, slots: torch.Tensor, staging: torch.Tensor, word: str
) -> None:
    with pytest.raises(ArgumentError, match=word):
        ops.gather_rows(pool, slots, staging)
