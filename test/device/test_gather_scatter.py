"""Rows of bytes to and from the pool, whatever their size."""

from __future__ import annotations

import itertools

import pytest
import torch

from sglang_hc.device.gather_scatter import gather, scatter, word
from support.tiers import ToyPool

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@pytest.mark.parametrize(("width", "size"), [(24, 8), (12, 4), (6, 2), (7, 1)])
def test_rows_are_copied_in_the_widest_words_that_fit(width: int, size: int) -> None:
    rows = torch.randint(0, 256, (3, width), dtype=torch.uint8)
    assert word(rows) is WORDS[size]
    pool = torch.zeros((20, width), dtype=torch.uint8)
    slots = torch.tensor([3, 19, 1])
    scatter(pool, slots, rows)
    assert torch.equal(pool[slots], rows)
    pool[slots] = 0
    assert not pool.any()


@pytest.mark.parametrize(("offset", "stride"), [(0, 25), (4, 32), (1, 32)])
def test_rows_that_lie_off_the_words_fall_back_to_narrower_ones(offset: int, stride: int) -> None:
    pool = torch.zeros((20, stride), dtype=torch.uint8)[:, offset : offset + 24]
    rows = torch.randint(0, 256, (3, 24), dtype=torch.uint8)
    slots = torch.tensor([3, 19, 1])
    scatter(pool, slots, rows)
    assert torch.equal(pool[slots], rows)


def test_gathered_rows_land_behind_each_other_in_every_part() -> None:
    pool = ToyPool(9, 3, (8, 6))
    for part in itertools.chain(*pool.kv):
        part.random_(0, 256)
    targets = [torch.zeros((2, 7, width), dtype=torch.uint8) for width in (8, 6)]
    slots = torch.tensor([8, 0, 5])
    gather(pool, range(1, 3), slots, targets, 2)
    for part, target in enumerate(targets):
        for index, layer in enumerate((1, 2)):
            assert torch.equal(target[index, 2:5], pool.kv[layer][part][slots])
        assert not target[:, :2].any() and not target[:, 5:].any()


def test_a_narrower_row_leaves_the_rest_of_its_place() -> None:
    pool = ToyPool(9, 1, (8, 6))
    for part in pool.kv[0]:
        part.random_(0, 256)
    targets = [torch.full((1, 5, 12), 7, dtype=torch.uint8) for _ in range(2)]
    slots = torch.tensor([8, 0, 5])
    gather(pool, range(1), slots, targets, 1)
    for part, target in zip(pool.kv[0], targets, strict=True):
        width = part.shape[1]
        assert torch.equal(target[0, 1:4, :width], part[slots])
        assert (target[0, :, width:] == 7).all()
