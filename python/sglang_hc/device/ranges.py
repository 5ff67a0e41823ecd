"""Many ranges of bytes that are copied from one buffer to another as one piece of work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Offsets = npt.NDArray[np.int64]


class Ranges(NamedTuple):
    """Three arrays of n int64 numbers: range i is `sizes[i]` bytes long.

    sources, targets: bytes from the first byte of the source and of the target. The targets do not
    overlap, so the ranges may be copied in any order.
    """

    sources: Offsets
    targets: Offsets
    sizes: Offsets


def each_range(
    target: torch.Tensor, source: torch.Tensor, ranges: Ranges
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The ranges as pairs (target, source) of one-dimensional uint8 views."""
    into, out_of = _flat(target), _flat(source)
    for start, at, size in zip(*(column.tolist() for column in ranges), strict=True):
        yield into.narrow(0, at, size), out_of.narrow(0, start, size)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes from a uint8 tensor's first one to its last one, gaps included."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))
