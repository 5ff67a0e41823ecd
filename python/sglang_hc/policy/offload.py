"""Which layers have their weights in host memory, and how long a pass they are worth."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hc.errors import ConfigError
from sglang_hc.policy.fit import Fit

AUTO = "auto"
"""Size of the weights in host memory: what does not fit on the device."""

LONGEST_CHUNK = 16_384
"""Most tokens of a pass that grows."""

FEWEST = 3
"""Layers that are worth a ring: its two places take as much of the device as two layers."""


def check_size(gib: float | str) -> None:
    """Raise ConfigError unless it is a size in GiB or `auto`; it does not name the option."""
    if gib != AUTO and not isinstance(gib, float):
        raise ConfigError(f"must be GiB or auto, got {gib!r}")
    if isinstance(gib, float) and not 0 <= gib < float("inf"):
        raise ConfigError(f"must be 0 or more GiB, or auto, got {gib:g}")


def spread(count: int, layers: int) -> tuple[int, ...]:
    """`count` of `layers` layers, as evenly as can be: so a layer comes while others run."""
    return tuple(number * layers // count for number in range(count))


def holding(wanted: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The fewest layers that have `wanted` bytes, or all. sizes: bytes of each layer's matrices."""
    if not wanted:
        return ()
    for count in range(min(FEWEST, len(sizes)), len(sizes)):
        chosen = spread(count, len(sizes))
        if sum(sizes[layer] for layer in chosen) >= wanted:
            return chosen
    return tuple(range(len(sizes)))


def fitting(room: int, sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The fewest layers without which the others and the ring take at most `room` bytes of the
    device; None where that takes more than all."""
    if sum(sizes) <= room:
        return ()
    for count in range(min(FEWEST, len(sizes)), len(sizes) + 1):
        chosen = spread(count, len(sizes))
        hosted = [sizes[layer] for layer in chosen]
        if sum(sizes) - sum(hosted) + 2 * max(hosted) <= room:
            return chosen
    return None


def balanced_chunk(prefill: Fit, weights: float, chunk: int, most: int) -> int:
    """Tokens of a pass that computes for as long as its weights take to come: a multiple of
    `chunk`, at most `most` and `LONGEST_CHUNK`, and not less than it is.

    prefill: seconds of a layer for so many tokens. weights: seconds of a layer's weights.
    """
    grown = chunk
    while prefill.seconds(grown, 0) < weights and grown + chunk <= min(most, LONGEST_CHUNK):
        grown += chunk
    return grown
