"""The check at start that recomputed layers do not depend on how their tokens are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hc.srt.model.recompute import compare_pieces


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.uint8, 0.15)],
)
@pytest.mark.parametrize("is_beyond", [False, True])
def test_so_much_may_differ_between_one_piece_and_two(
    dtype: torch.dtype, limit: float, is_beyond: bool
) -> None:
    """Of a pool of 8 bits more than of any other."""
    group: Any = SimpleNamespace(most=lambda error: limit * (1.01 if is_beyond else 1))
    pool: Any = SimpleNamespace(rows=lambda layer: [torch.ones((4, 8), dtype=dtype)])
    recomputer: Any = SimpleNamespace(recompute=lambda *_, **__: None)
    found = compare_pieces(recomputer, pool, torch.arange(4), dtype, 1, group)
    assert (found[0] is not None) == is_beyond
