"""Rows that are the same on every tensor-parallel rank, divided over the ranks by columns.

The input of the QKV projection and the latent rows of MLA are such rows: each rank stores its part
of them only, and the parts are put together again on the way back (HCache section 5 divides hidden
states over GPUs as well). Columns and not tokens: then blocks, tails and slots are the same on all
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_hc.srt.binding import parallel


@dataclass(frozen=True)
class Columns:
    """Columns [first, first + count) of a row, which this rank keeps. group: of SGLang, all ranks;
    not looked at where one rank keeps all columns."""

    first: int
    count: int
    ranks: int = 1
    group: Any = None

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, all columns) -> (n, count), a view."""
        return rows[:, self.first : self.first + self.count]

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """(n, count) of each rank -> (n, all columns).

        A collective in the order of the model's own: on the stream that the model runs on.
        """
        if self.ranks == 1:
            return part
        gathered: torch.Tensor = self.group.all_gather(part.contiguous(), dim=1)
        return gathered


def all_columns(width: int) -> Columns:
    """What a rank keeps that is the only one."""
    return Columns(0, width)


def columns_of(width: int) -> Columns:
    """What this rank keeps of rows of `width` elements, or bytes: its part of them where they can
    be divided evenly, and else the whole rows."""
    ranks = parallel.tp_size()
    if ranks == 1 or width % ranks:
        return all_columns(width)
    count = width // ranks
    return Columns(parallel.tp_rank() * count, count, ranks, parallel.tp_group())
