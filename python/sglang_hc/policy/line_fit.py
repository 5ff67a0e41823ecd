"""Least-squares fits of measured times: lines, and the quadratic of prefill (HybridServe 4.3).

What is minimized is the error as a share of each sample: plans compare times of all sizes, and the
64 new tokens of a turn count as much as the prefill of a long history.

Coefficients are never negative: a negative one would promise that more work takes less time, and
a plan would believe it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

NonNegative = Annotated[float, Meta(ge=0)]
"""Checked where a profile file is read."""

R2 = Annotated[float, Meta(le=1)]

POOR_R2 = 0.95
"""A fit that explains less of the variance is poor. HybridServe reports 0.99 on an idle GPU; below
0.95 the error of single samples reaches the differences between plans that the planner weighs."""


class FitError(ValueError):
    """Samples that cannot be fitted. The message is for users."""


@dataclass(frozen=True)
class Line:
    """Seconds for n tokens: max(floor, fixed + per_token * n), and 0 for no tokens.

    floor: seconds that no call undercuts, however few its tokens: the time to read the weights, or
    the fastest sample. r2: coefficient of determination of the fit, 1 for data-sheet lines.
    """

    fixed: NonNegative
    per_token: NonNegative
    floor: NonNegative = 0.0
    r2: R2 = 1.0

    def seconds(self, tokens: float) -> float:
        """Seconds for `tokens` >= 0."""
        if tokens <= 0:
            return 0.0
        return max(self.floor, self.fixed + self.per_token * tokens)

    @property
    def is_poor(self) -> bool:
        return self.r2 < POOR_R2


@dataclass(frozen=True)
class Quadratic:
    """Seconds to prefill one layer: max(floor, fixed + per_token * new + per_pair * pairs).

    pairs = new * (context + new / 2): each new token attends to the context before it and, on
    average, to half of the new tokens. 0 for no new tokens. floor and r2 as in `Line`.
    """

    fixed: NonNegative
    per_token: NonNegative
    per_pair: NonNegative
    floor: NonNegative = 0.0
    r2: R2 = 1.0

    def seconds(self, new: float, context: float) -> float:
        """Seconds for `new` tokens behind `context` tokens whose KV is in the pool."""
        if new <= 0:
            return 0.0
        return max(
            self.floor,
            self.fixed + new * (self.per_token + self.per_pair * (context + 0.5 * new)),
        )

    @property
    def is_poor(self) -> bool:
        return self.r2 < POOR_R2


def fit_line(samples: Sequence[tuple[int, float]]) -> Line:
    """Line through samples of (tokens, seconds).

    The floor is the fastest sample, so the smallest size in use (one block) should be among them.
    Raises FitError for fewer than two different sizes or for nonsense numbers.
    """
    _check([(float(tokens),) for tokens, _ in samples], [s for _, s in samples], 2)
    rows = [(1.0, float(tokens)) for tokens, _ in samples]
    seconds = [s for _, s in samples]
    fixed, per_token = _nonnegative_least_squares(rows, seconds)
    line = Line(fixed, per_token, min(seconds))
    r2 = _r2(seconds, [line.seconds(tokens) for tokens, _ in samples])
    return Line(fixed, per_token, line.floor, r2)


def fit_quadratic(samples: Sequence[tuple[int, int, float]]) -> Quadratic:
    """Prefill cost through samples of (new tokens, context tokens, seconds), one layer each.

    Raises FitError for fewer than three different (new, context) or for nonsense numbers.
    """
    seconds = [s for _, _, s in samples]
    _check([(float(new), float(context)) for new, context, _ in samples], seconds, 3)
    rows = [(1.0, float(new), new * (context + 0.5 * new)) for new, context, _ in samples]
    fixed, per_token, per_pair = _nonnegative_least_squares(rows, seconds)
    fit = Quadratic(fixed, per_token, per_pair, min(seconds))
    r2 = _r2(seconds, [fit.seconds(new, context) for new, context, _ in samples])
    return Quadratic(fixed, per_token, per_pair, fit.floor, r2)


def _check(points: Sequence[tuple[float, ...]], seconds: Sequence[float], needed: int) -> None:
    if len(set(points)) < needed:
        raise FitError(f"a fit needs samples of {needed} different sizes, got {len(set(points))}")
    for point, second in zip(points, seconds, strict=True):
        if point[0] < 1 or min(point) < 0 or not all(map(math.isfinite, point)):
            raise FitError(f"a sample has the impossible size {point}")
        if not math.isfinite(second) or second <= 0:
            raise FitError(f"the sample of size {point} took {second} seconds; it must be positive")


def _nonnegative_least_squares(
    rows: Sequence[tuple[float, ...]], target: Sequence[float]
) -> list[float]:
    import numpy as np
    from scipy.optimize import nnls  # takes most of a second to import, and few programs fit

    # Columns differ by nine orders of magnitude (1 against token pairs), and scipy's tolerance is
    # absolute: everything is scaled to at most 1.
    columns = np.asarray(rows) / np.asarray(target)[:, None]
    widths = columns.max(axis=0)
    found, _ = nnls(columns / widths, np.ones(len(rows)))
    return [float(value) for value in found / widths]


def _r2(measured: Sequence[float], fitted: Sequence[float]) -> float:
    mean = math.fsum(measured) / len(measured)
    spread = math.fsum((y - mean) ** 2 for y in measured)
    missed = math.fsum((y - f) ** 2 for y, f in zip(measured, fitted, strict=True))
    if spread == 0.0:
        return 1.0 if missed <= 1e-18 * mean * mean * len(measured) else 0.0
    return 1.0 - missed / spread
