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

NOT_USED = "sglang-hc: %s by %s is not used: %s"

Seconds = Callable[[Callable[[], object]], float]
"""Seconds that some work takes, from an idle device until it is idle again."""

Differs = Callable[[torch.Tensor, torch.Tensor], str | None]
"""(first way's result, another's): says what is wrong, or None."""

W = TypeVar("W")


def choose(
    what: str,
    ways: Mapping[str, W],
    result: Callable[[W], torch.Tensor],
    differs: Differs,
    work: Callable[[W], object],
    seconds: Seconds,
) -> str:
    """Name of the fastest of the ways that give the same result as the first one.

    result: what a way gives. differs: see `agreeing`. work: a way's work that is timed.
    """
    if len(ways) == 1:
        return next(iter(ways))
    names = agreeing(what, {n: partial(result, way) for n, way in ways.items()}, differs)
    return fastest(what, {name: partial(work, ways[name]) for name in names}, seconds)


def agreeing(
    what: str, ways: Mapping[str, Callable[[], torch.Tensor]], differs: Differs
) -> list[str]:
    """Names of the ways that give the same result as the first. The others are logged and left out.

    Each way returns its result.
    """
    (first, reference_way), *others = ways.items()
    reference = reference_way()
    good = [first]
    for name, way in others:
        try:
            wrong = differs(reference, way())
        except Exception as error:
            # A kernel that does not compile or launch here is left out; the start goes on.
            wrong = f"{type(error).__name__}: {error}"
        if wrong is None:
            good.append(name)
        else:
            logger.warning(NOT_USED, what, name, wrong)
    return good


def fastest(what: str, ways: Mapping[str, Callable[[], object]], seconds: Seconds) -> str:
    """Name of the way with the smallest median time. They take turns; a single way is not timed.

    A way that fails is logged and left out, unless it is the first: what that raises, this raises.
    """
    if len(ways) == 1:
        return next(iter(ways))
    good = running(what, ways)
    times: dict[str, list[float]] = {name: [] for name in good}
    for _ in range(ROUNDS):
        for name, way in good.items():
            times[name].append(seconds(way))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    best = min(medians, key=medians.__getitem__)
    shown = ", ".join(f"{name} {1e3 * median:.3f} ms" for name, median in medians.items())
    logger.info("sglang-hc: %s by %s (%s)", what, best, shown)
    return best


def running(what: str, ways: Mapping[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """The ways that run; each one is run once, which pays for compiling and for memory."""
    good: dict[str, Callable[[], object]] = {}
    for name, way in ways.items():
        try:
            way()
        except Exception as error:  # noqa: PERF203
            # A kernel may fit at the few rows by which ways are compared and not at those timed.
            if not good:
                raise
            logger.warning(NOT_USED, what, name, f"{type(error).__name__}: {error}")
        else:
            good[name] = way
    return good


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
