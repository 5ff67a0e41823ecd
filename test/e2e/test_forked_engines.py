"""An engine that a test forks computes, whatever the test session computed before."""

from __future__ import annotations

import pytest
import torch

from support.core import run_in_child

LARGE = 4_000_000  # elements that torch deals over all threads it has


def total(threads: int | None) -> float:
    if threads is not None:
        torch.set_num_threads(threads)
    return float(torch.ones(LARGE).sum())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("threads", [None, 1, 2])
def test_a_forked_child_computes_after_its_parent_has(threads: int | None) -> None:
    assert total(None) == LARGE
    assert run_in_child(total, threads) == LARGE
