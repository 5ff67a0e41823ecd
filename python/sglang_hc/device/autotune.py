"""Several ways to do the same work: which of them agree with the first one, and which is fastest.

The fastest way depends on the machine, so it is measured there, once, at start.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

ROUNDS = 5

Seconds = Callable[[Callable[[], object]], float]
"""Seconds that some work takes, from an idle device until it is idle again."""

Differs = Callable[[torch.Tensor, torch.Tensor], str | None]
"""(first way's result, another's): says what is wrong, or None."""

W = TypeVar("W")


def choose(
    what: str,
    ways: Mapping[str, W],
    work: Callable[[W], object],
    seconds: Seconds,
    result: Callable[[W], torch.Tensor] | None = None,
    differs: Differs | None = None,
) -> str:
    """Name of the fastest of the ways that run, and that give the same result as the first one.

    The smallest median time wins; the ways take turns, and a single way is not run at all. One that
    fails or differs is logged and left out, unless it is the first: what that raises, this raises.
    work: of a way, timed. result: what a way gives; None where there is nothing to compare.
    """
    if len(ways) == 1:
        return next(iter(ways))
    good: dict[str, W] = {}
    reference = None
    for name, way in ways.items():
        wrong = None
        try:
            if result is not None and differs is not None:
                found = result(way)
                if reference is None:
                    reference = found
                else:
                    wrong = differs(reference, found)
            if wrong is None:
                work(way)  # pays for compiling and for memory
        except Exception as error:
            # A kernel that does not compile, launch or fit here is left out; the start goes on.
            if not good:
                raise
            wrong = f"{type(error).__name__}: {error}"
        if wrong is None:
            good[name] = way
        else:
            logger.warning("sglang-hc: %s by %s is not used: %s", what, name, wrong)
    times: dict[str, list[float]] = {name: [] for name in good}
    for _ in range(ROUNDS):
        for name, way in good.items():
            times[name].append(seconds(partial(work, way)))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    best = min(medians, key=medians.__getitem__)
    shown = ", ".join(f"{name} {1e3 * median:.3f} ms" for name, median in medians.items())
    logger.info("sglang-hc: %s by %s (%s)", what, best, shown)
    return best


def bytes_differ(first: torch.Tensor, other: torch.Tensor) -> str | None:
    """`Differs` for results that must be the same bytes."""
    wrong = int((first != other).sum())
    return f"{wrong} of {first.numel()} bytes differ" if wrong else None


def seconds_on(device: torch.device) -> Seconds:
    """A timer of work on a device; the time to submit the work counts."""
    streams = torch.get_device_module(device)

    def seconds(work: Callable[[], object]) -> float:
        streams.synchronize()
        begin = time.perf_counter()
        work()
        streams.synchronize()
        return time.perf_counter() - begin

    return seconds
