"""One factor by which a resource is slower or faster than the probe at the start said.

A probe is short, and perhaps something else used the machine meanwhile. Each restoration, read and
prefill then tells how long a resource really took. The factor is the median of the last WINDOW
observations, PRIOR of which are what was known at the beginning. So a single slow pass changes
nothing, and three agreeing observations do. The factor never leaves [1/BOUND, BOUND]. Two resources
that share a time are told apart by how their parts vary (`told_apart`).

Pure: no clock, no randomness. The same observations give the same factors.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Sequence

WINDOW = 7
"""Observations that count, the newest. Four of them must agree to move a factor for good."""

PRIOR = 2
"""Observations that the window begins with: what the costs at the start are worth."""

STEP = 1.3
"""A factor that has moved by more than this may turn decisions: what was refused is tried again,
and the costs are kept for the next start."""

BOUND = 256.0
"""Largest factor, and the reciprocal of the smallest. A probe on a machine whose cores are taken
may be a hundred times off."""


class Resource(enum.Enum):
    """What is timed on its own."""

    KV_COPY = "kv_copy"
    """K and V from host memory into the device pool."""
    HIDDEN_COPY = "hidden_copy"
    """Hidden states from host memory onto the device."""
    PROJECTION = "projection"
    """Hidden states to K and V."""
    PREFILL = "prefill"
    """Layers run over tokens, without their attention; also what recomputing costs."""
    ATTENTION = "attention"
    """Attention of a prefill to its context and to itself."""
    DISK = "disk"
    """Blocks from disk into host memory."""
    REMOTE = "remote"
    """Blocks from a remote store into host memory."""

    # A factor is looked up for every cost, and Enum's own hash is a Python function.
    __hash__ = object.__hash__


class Correction:
    """The factor of one resource, in logarithms."""

    def __init__(self, known: float | None, bound: float = BOUND) -> None:
        """known: the factor so far; None where nothing is known, and the first observation is
        believed."""
        self._limit = math.log(bound)
        self._counted = None if known is None else math.log(known)
        prior = [] if self._counted is None else [self._counted] * PRIOR
        self._recent: deque[float] = deque(prior, WINDOW)
        self.observations = 0
        self.steps = 0
        """How often the factor has moved by more than STEP since it was last counted."""

    def observe(self, factor: float) -> float:
        """The factor was seen to be `factor`. Returns the one that counts now."""
        self._recent.append(max(-self._limit, min(self._limit, math.log(factor))))
        self.observations += 1
        median = statistics.median(self._recent)
        if self._counted is None or abs(median - self._counted) > math.log(STEP):
            self._counted = median
            self.steps += 1
        return math.exp(median)


TOGETHER = 0.02
"""How strongly two factors are held to a common one, beside the observations."""


def told_apart(seen: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """By what the expected seconds of two resources have to be multiplied.

    seen: what each was expected to take of one observed time, as shares of it. The factors are
    those of the least relative error that are close to a common one: where the parts hardly vary,
    both get what their sum says.
    """
    common = statistics.median(1 / (one + other) for one, other in seen)
    hold = TOGETHER / common**2
    ones = hold + math.fsum(one * one for one, _ in seen)
    others = hold + math.fsum(other * other for _, other in seen)
    both = math.fsum(one * other for one, other in seen)
    one_sum = hold * common + math.fsum(one for one, _ in seen)
    other_sum = hold * common + math.fsum(other for _, other in seen)
    scale = ones * others - both * both
    one = (one_sum * others - other_sum * both) / scale
    other = (other_sum * ones - one_sum * both) / scale
    return max(one, common / 4), max(other, common / 4)  # noise may make one of them negative
