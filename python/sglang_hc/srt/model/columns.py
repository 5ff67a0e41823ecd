"""Hidden states divided over tensor-parallel ranks: each rank keeps some columns of every row.

The input of the QKV projection is the same on every rank, so a rank stores its part only, and the
ranks' parts are put together again before the projection (HCache section 5 divides hidden states
over GPUs as well). Columns and not tokens: then blocks, tails and slots are the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class HiddenColumns:
    """Columns [first, first + count) of a hidden state, which this rank keeps. group: of SGLang,
    all ranks; not looked at where one rank keeps all columns."""

    first: int
    count: int
    ranks: int
    group: Any = None

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """(n, count) elements, or bytes, of each rank as (n, all columns).

        A collective in the order of the model's own: on the stream that the model runs on.
        """
        if self.ranks == 1:
            return part
        gathered: torch.Tensor = self.group.all_gather(part.contiguous(), dim=1)
        return gathered


def columns_of(runner: Any, width: int) -> HiddenColumns:
    """This rank's columns of hidden states of `width` elements, which `not_divisible` was asked
    about."""
    state = runner.ps
    if state.tp_size == 1:
        return HiddenColumns(0, width, 1)
    count = width // state.tp_size
    return HiddenColumns(state.tp_rank * count, count, state.tp_size, runner.tp_group)


def not_divisible(runner: Any, width: int) -> str | None:
    """Why hidden states of `width` elements cannot be divided over the ranks; None: they can."""
    ranks = runner.ps.tp_size
    return f"{ranks} ranks cannot divide {width} columns" if width % ranks else None
