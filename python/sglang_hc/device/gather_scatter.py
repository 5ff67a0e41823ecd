"""Rows of bytes between the KV pool and staging, by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

_WIDE = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


class Places(NamedTuple):
    """At which row of its part a slot's row lies: those of a page's slots are consecutive, from
    `first` on, and two pages are `stride` rows apart. By default a slot's number is its row's."""

    page: int = 1
    stride: int = 1
    first: int = 0

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows (n,) int64 of slots (n,) int64."""
        if self == (1, 1, 0):
            return slots
        pages = torch.div(slots, self.page, rounding_mode="floor")
        return slots + (pages * (self.stride - self.page) + self.first)


class DevicePool(Protocol):
    """The device's KV pool as rows of bytes."""

    def rows(self, layer: int) -> list[torch.Tensor]:
        """One (slots, part bytes) uint8 view per part of a KV row."""

    def gather(
        self, layers: Sequence[int], slots: torch.Tensor, targets: list[torch.Tensor], at: int
    ) -> None:
        """Rows `slots` of each layer to rows [at, at + n) of targets[part][layer's index].

        targets: per part of a KV row a (layers, capacity, part bytes) uint8 tensor.
        """


def word(*tensors: torch.Tensor) -> torch.dtype:
    """The widest integer type as which all of these (n, bytes) uint8 tensors can be viewed.

    Copies by index go element by element, so wide ones are up to ten times faster on a CPU.
    """
    numbers = [n for t in tensors for n in (t.shape[-1], t.stride(0), t.storage_offset())]
    for size, dtype in _WIDE:
        if all(number % size == 0 for number in numbers):
            return dtype
    return torch.uint8


def scatter(target: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Row i of `rows` to row slots[i] of `target`; both (n, bytes) uint8, slots (n,) int64."""
    dtype = word(target, rows)
    target.view(dtype).index_copy_(0, slots, rows.view(dtype))


def gather(
    pool: DevicePool,
    layers: Sequence[int],
    slots: torch.Tensor,
    targets: list[torch.Tensor],
    at: int,
) -> None:
    """`DevicePool.gather`. A layer's rows may be narrower than the targets'; what is behind them
    stays."""
    for index, layer in enumerate(layers):
        for target, rows in zip(targets, pool.rows(layer), strict=True):
            select(rows, slots, target[index, at : at + slots.numel(), : rows.shape[1]])


def select(rows: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Row slots[i] of `rows` to row i of `out`; both (n, bytes) uint8, slots (n,) int64."""
    dtype = word(rows, out)
    torch.index_select(rows.view(dtype), 0, slots, out=out.view(dtype))
