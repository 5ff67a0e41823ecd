"""Products of matrices whose bits depend on what they should not."""

from __future__ import annotations

from collections.abc import Callable

import torch


def in_order(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    backwards: bool = False,
) -> torch.Tensor:
    """Adds up in float32 from the first element to the last, or the other way; element by element,
    so that nothing but the order decides about the bits."""
    total = torch.zeros((rows.shape[0], weight.shape[0]))
    places = range(rows.shape[1])
    for k in reversed(places) if backwards else places:
        total += rows[:, k : k + 1].float() * weight[:, k].float()
    if bias is not None:
        total += bias.float()
    return total.to(rows.dtype)


def backwards_where(other: Callable[[int, int], bool]) -> Callable[..., torch.Tensor]:
    """A product whose order is another one where `other` says so of (rows, rows of the weight)."""

    def product(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return in_order(rows, weight, bias, backwards=other(rows.shape[0], weight.shape[0]))

    return product


by_count = backwards_where(lambda rows, _: rows <= 3)
"""Another order for up to three rows, as float32 products of a CPU have."""
