from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import examples
from sglang_hc_kernels import ArgumentError, PointerTable, ops, reference, triton_rows


def random_bytes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@settings(max_examples=examples(60), deadline=None)
@given(
    layers=st.integers(1, 3),
    count=st.integers(0, 12),
    row=st.one_of(st.integers(1, 70), st.sampled_from([64, 128, 1032, 9000])),
    padding=st.sampled_from([0, 1, 8, 16]),
    spare=st.sampled_from([0, 1, 5]),
    gap=st.sampled_from([0, 2, 16]),
    offset=st.sampled_from([0, 1, 4, 16]),
    seed=st.integers(0, 2**31),
)
def test_kernel_moves_exactly_the_named_rows(
    layers: int, count: int, row: int, padding: int, spare: int, gap: int, offset: int, seed: int,
    device: str,
) -> None:  # fmt: skip
    """padding: bytes between the pool's rows; spare, gap: rows and bytes of the staging that are
    somebody else's; offset: where it begins in its memory."""
    generator = torch.Generator().manual_seed(seed)
    size = count + 4
    sources = [
        random_bytes(generator, size, row + padding).to(device)[:, :row] for _ in "a" * layers
    ]
    slots = torch.randint(-2, size + 1, (count,), generator=generator).to(device)
    rows = count + spare
    memory = random_bytes(generator, offset + layers * rows * (row + gap)).to(device)
    expected = memory.clone()

    def staging(of: torch.Tensor) -> torch.Tensor:
        return of[offset:].view(layers, rows, row + gap)[:, :, :row]

    triton_rows.gather_rows(PointerTable(sources), slots, staging(memory))
    # Rows past the end are skipped by the kernel and refused by the reference.
    reference.gather_rows(sources, torch.where(slots < size, slots, -1), staging(expected))
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_a_table_serves_staging_of_any_place_and_size(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = [torch.randn(10, 2, 8, generator=generator).to(dtype).to(device) for _ in range(3)]
    table = PointerTable(pool)
    slots = torch.tensor([7, -1, 0, 3], device=device)
    for rows in (4, 5):
        staging = torch.zeros(3, rows, table.row_bytes, dtype=torch.uint8, device=device)
        ops.gather_rows(table, slots, staging)
        for layer in range(3):
            for place, slot in ((0, 7), (2, 0), (3, 3)):
                kept = pool[layer][slot].flatten().view(torch.uint8)
                assert torch.equal(staging[layer, place], kept)
            assert staging[layer, 1].eq(0).all() and staging[layer, 4:].eq(0).all()


def test_a_slot_past_the_end_is_an_error_on_cpu() -> None:
    staging = torch.ones(1, 2, 4, dtype=torch.uint8)
    with pytest.raises(IndexError):
        ops.gather_rows(PointerTable(torch.ones(1, 2, 1)), torch.tensor([2]), staging)


def staged(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("slots", "staging", "word"),
    [
        (torch.tensor([0]), staged(2, 2, 16), "2 layers of 16 bytes"),
        (torch.tensor([0]), staged(1, 2, 15), "1 layers of 15 bytes"),
        (torch.tensor([0, 1, 0]), staged(1, 2, 16), "2 rows cannot take 3"),
        (torch.tensor([0]), torch.ones(1, 2, 16), "uint8"),
        (torch.tensor([0]), staged(2, 16), "layers, rows, bytes"),
        (torch.tensor([0]), staged(1, 16, 2).transpose(1, 2), "contiguous rows"),
        (torch.tensor([0], dtype=torch.int32), staged(1, 2, 16), "slots"),
        (torch.tensor([[0]]), staged(1, 2, 16), "slots"),
    ],
)
def test_bad_arguments_name_the_argument(
    slots: torch.Tensor, staging: torch.Tensor, word: str
) -> None:
    table = PointerTable(torch.ones(1, 2, 4))
    with pytest.raises(ArgumentError, match=word):
        ops.gather_rows(table, slots, staging)


@pytest.mark.parametrize(
    ("buffers", "word"),
    [
        (torch.ones(1, 4, 2).transpose(1, 2), "contiguous"),
        ([torch.ones(2, 4), torch.ones(3, 4)], "one shape"),
        ([], "at least one"),
    ],
)
def test_buffers_that_one_table_cannot_hold(buffers: list[torch.Tensor], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        PointerTable(buffers)
