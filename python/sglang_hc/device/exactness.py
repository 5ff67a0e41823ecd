"""Does a matrix product depend on how many rows are multiplied at once?

K and V that come back from hidden states are the bits that left only if the projection gives a row
the same bits in a restoration of hundreds of rows as in the decode step of one row that computed
it first. Libraries choose their kernels by shape, and kernels add up in different orders, so this
is measured and never assumed.

Ordinary operands show another order of additions in one element of a thousand or fewer, because
the sum is rounded to 16 bits afterwards. `cancelling` makes operands whose exact products are all
zero: what remains is the rounding of the additions themselves, and another order shows in most
elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(rows (n, size), weight (out, size), bias (out,) or None) -> (n, out)."""

ROWS = (1, 2, 3, 7, 16, 33, 64, 129, 256, 1000)
"""Row counts that are compared: decode steps, odd pieces, prefill chunks."""

MOST_ROWS = max(ROWS)

MANY_ROWS = 100
"""From this count on a window is taken at two places instead of four."""

TILE_ROWS = 16
"""Rows of one fixed tile. On an AMD EPYC with one thread and a weight of 3072 x 1024, a single row
takes 3 to 15 times as long as without tiles, a thousand rows 1.0 to 1.6 times."""


@dataclass(frozen=True)
class Exactness:
    """How restored K and V compare with those that left the device, as measured at start.

    bit: no sample of what this server restores differed in a bit. difference: the largest one of
    the samples, relative to the largest magnitude of the layer's K and V.
    """

    bit: bool
    difference: float

    def stats(self) -> dict[str, object]:
        """For /server_info."""
        word = "bit" if self.bit else "rounding"
        return {"exactness": word, "exactness_difference": self.difference}


class Operands(NamedTuple):
    """rows (n, size), weight (out, size), bias (out,) or None."""

    rows: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def relative_error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference of two tensors of one shape, relative to the largest magnitude of
    `wanted`; nan where an element is."""
    wanted, found = wanted.float(), found.float()
    return float((wanted - found).abs().max()) / (float(wanted.abs().max()) or 1.0)


def cancelling(
    size: int, out: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> Operands:
    """MOST_ROWS rows and a weight whose products are zero but for the rounding of the additions.

    Each product of two elements appears twice with opposite signs, at places that a seeded
    permutation draws. The bias is as small as what remains, so that it hides nothing.
    """
    generator = torch.Generator().manual_seed(size)
    half = size // 2
    states = torch.randn((MOST_ROWS, half), generator=generator)
    weight = torch.randn((out, half), generator=generator)
    left = torch.zeros((MOST_ROWS, size - 2 * half))
    idle = torch.zeros((out, size - 2 * half))
    places = torch.randperm(size, generator=generator)
    states = torch.cat([states, -states, left], dim=1)[:, places]
    weight = torch.cat([weight, weight, idle], dim=1)[:, places]
    small = torch.randn(out, generator=generator) * 1e-6 if bias else None
    return Operands(
        states.to(device, dtype).contiguous(),
        weight.to(device, dtype).contiguous(),
        None if small is None else small.to(device, dtype),
    )


def row_dependence(
    forward: Callable[[torch.Tensor], torch.Tensor],
    restoring: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
) -> str | None:
    """What shows that K and V would come back with other bits; None when nothing does.

    forward, restoring: (n, size) -> (n, columns), the columns of K and V as the model's forward
    pass and as a restoration compute them. states: (MOST_ROWS, size). Both are run over all of
    ROWS at several places, and compared bit by bit with one forward product of all the rows.
    """
    wanted = forward(states)
    for first, last in windows(states.shape[0]):
        for name, product in (("the forward pass", forward), ("a restoration", restoring)):
            if not torch.equal(product(states[first:last]), wanted[first:last]):
                return (
                    f"{last - first} rows of {name} are not the bits of the same rows among "
                    f"{states.shape[0]}"
                )
    return None


def tiled(product: Product, rows: int = TILE_ROWS) -> Product:
    """`product` run on tiles of exactly `rows` rows, the last one filled up with zeros.

    Every product has one shape, however many rows there are, so the library has one kernel to
    choose. That a row's place in its tile does not matter either is for `row_dependence` to show.
    """

    def run(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        count = states.shape[0]
        result = states.new_empty((count, weight.shape[0]))
        whole = count // rows * rows
        for first in range(0, whole, rows):
            result[first : first + rows] = product(states[first : first + rows], weight, bias)
        if whole < count:
            tile = states.new_zeros((rows, states.shape[1]))
            tile[: count - whole] = states[whole:]
            result[whole:] = product(tile, weight, bias)[: count - whole]
        return result

    return run


def windows(rows: int) -> Iterator[tuple[int, int]]:
    """Row ranges of all ROWS that fit into `rows`: at both ends, and at odd places between."""
    for count in ROWS:
        last = rows - count
        places = {0, min(5, last), last // 2, last} if count < MANY_ROWS else {0, last}
        for first in sorted(place for place in places if place >= 0):
            yield first, first + count
