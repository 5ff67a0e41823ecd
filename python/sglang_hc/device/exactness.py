"""Does a matrix product depend on how many rows are multiplied at once?

A restoration projects hundreds of rows at once, where the decode step that computed them had one.
K and V come back with the same bits only if the product gives a row the same bits in both cases.
Libraries choose a kernel by the shape, and kernels add in different orders, so this is measured and
never assumed.

With ordinary operands another order of additions shows in at most one element of a thousand,
because the sum is then rounded to 16 bits. `cancelling` makes operands whose exact products are all
zero. Only the rounding of the additions remains, and another order shows in most elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(rows (n, size), weight (out, size), bias (out,) or None) -> (n, out)."""

ROWS = (1, 2, 3, 7, 16, 33, 64, 129, 256, 1000)
"""The compared numbers of rows, as decode steps, odd pieces and prefill chunks have them."""

MOST_ROWS = max(ROWS)

MANY_ROWS = 100
"""Windows of at least this many rows are compared at two places instead of four."""

TILE_ROWS = 16
"""Rows of one fixed tile. On an AMD EPYC with one thread and a weight of 3072 x 1024, a single row
takes 3 to 15 times as long as without tiles, a thousand rows 1.0 to 1.6 times."""


@dataclass(frozen=True)
class Exactness:
    """How restored K and V compare with those that left the device, as measured at start.

    bit: no restored sample differed from its original in a bit. difference: the largest difference
    of the samples, relative to the largest magnitude of the layer's K and V.
    """

    bit: bool
    difference: float

    def stats(self) -> dict[str, object]:
        """For /server_info."""
        word = "bit" if self.bit else "rounding"
        return {"exactness": word, "exactness_difference": self.difference}


def relative_error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference of two tensors of one shape, relative to the largest magnitude of
    `wanted`; nan where an element is."""
    wanted, found = wanted.float(), found.float()
    return float((wanted - found).abs().max()) / (float(wanted.abs().max()) or 1.0)


def cancelling(
    size: int, out: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """MOST_ROWS rows, a weight and a bias or None, whose products are zero but for the rounding of
    the additions.

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
    return (
        states.to(device, dtype).contiguous(),
        weight.to(device, dtype).contiguous(),
        None if small is None else small.to(device, dtype),
    )


def row_dependence(
    forward: Callable[[torch.Tensor], torch.Tensor],
    restoring: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
) -> str | None:
    """Evidence that K and V would come back with other bits; None when there is none.

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

    Every product has the same shape, however many rows there are, so the library always chooses the
    same kernel. `row_dependence` checks that a row's place in its tile does not matter either.
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
    """Row ranges of all sizes in ROWS that fit into `rows`: at both ends and at places between."""
    for count in ROWS:
        last = rows - count
        places = {0, min(5, last), last // 2, last} if count < MANY_ROWS else {0, last}
        for first in sorted(place for place in places if place >= 0):
            yield first, first + count
