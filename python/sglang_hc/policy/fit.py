"""Least-squares fits of measured times: lines, and the cost of prefill (HybridServe 4.3).

What is minimized is the error as a share of each sample: plans compare times of all sizes, and the
64 new tokens of a turn count as much as the prefill of a long history.

Coefficients are never negative: a negative one would promise that more work takes less time, and
a plan would believe it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

NonNegative = Annotated[float, Meta(ge=0)]
"""Checked where a profile file is read."""


@dataclass(frozen=True)
class Fit:
    """Seconds for one kind of work by its tokens: max(floor, fixed + per_token * new + per_pair *
    pairs + per_context * context), and 0 for no tokens.

    pairs = new * (context + new / 2): each new token attends to the context before it and, on
    average, to half of the new tokens. per_context: K and V of the context are read, however few
    the new tokens are. Without these two, for a copy or a projection, a line. floor: seconds that
    no call undercuts, however few its tokens: the time to read the weights, or the fastest sample.
    window, windowed: a share `windowed` of the layers attends to the last `window` tokens only, and
    the fit is for the average of all layers.
    """

    fixed: NonNegative
    per_token: NonNegative
    per_pair: NonNegative = 0.0
    per_context: NonNegative = field(default=0.0, kw_only=True)
    floor: NonNegative = field(default=0.0, kw_only=True)
    window: Annotated[int, Meta(ge=0)] = field(default=0, kw_only=True)
    windowed: Annotated[float, Meta(ge=0, le=1)] = field(default=0.0, kw_only=True)

    def seconds(self, new: float, context: float = 0.0) -> float:
        """Seconds for `new` >= 0 tokens behind `context` tokens."""
        if new <= 0:
            return 0.0
        if self.windowed:
            linear = self.fixed + self.per_token * new
            return max(self.floor, linear + self.attention(new, context))
        each = self.per_token + self.per_pair * (context + 0.5 * new)
        return max(self.floor, self.fixed + new * each + self.per_context * context)

    def attention(self, new: float, context: float) -> float:
        """The part of `seconds` that grows with the context and with the square of `new`."""
        if new <= 0:
            return 0.0
        whole = self.per_pair * new * (context + 0.5 * new) + self.per_context * context
        if not self.windowed:
            return whole
        inside = min(new, max(0.0, self.window - context))  # of the new ones that see everything
        pairs = inside * (context + 0.5 * inside) + (new - inside) * self.window
        near = self.per_pair * pairs + self.per_context * min(context, self.window)
        return whole + self.windowed * (near - whole)

    def attended(self, context: float) -> float:
        """Tokens of a context to which one token attends, on the average of the layers."""
        return context + self.windowed * (min(context, self.window) - context)

    def batch(self, lengths: Iterable[tuple[int, int]]) -> tuple[float, float]:
        """Seconds for several (new, context) in one pass: attention, and everything else."""
        tokens, attention = 0, 0.0
        for new, context in lengths:
            tokens += new
            attention += self.attention(new, context)
        whole = max(self.floor, self.fixed + self.per_token * tokens + attention)
        return attention, whole - attention

    def of_layers(self, share: float) -> Fit:
        """With so many times as many layers, of which the others do not attend."""
        return replace(
            self,
            fixed=self.fixed * share,
            per_token=self.per_token * share,
            floor=self.floor * share,
        )

    def of_bytes(self, share: float) -> Fit:
        """A line for tokens with so many times as many bytes; what a call costs stays."""
        return replace(self, per_token=self.per_token * share, floor=0.0)


@dataclass(frozen=True)
class StepFit:
    """Seconds of one decode step: of a line by the requests that decode, and for each token of all
    their contexts, whose K and V are read."""

    rows: Fit
    per_context: NonNegative

    def seconds(self, batch: int, context: float) -> float:
        """Seconds of a step of `batch` requests that attend to `context` tokens together."""
        return self.rows.seconds(batch) + self.per_context * context


def fit_step(samples: Sequence[tuple[int, int, float]]) -> StepFit:
    """Decode cost through samples of (requests, tokens of all their contexts, seconds).

    Raises ValueError for fewer than three different sizes or for nonsense numbers.
    """
    _check(samples, 3)
    rows = [(1.0, float(batch), float(context)) for batch, context, _ in samples]
    seconds = [second for _, _, second in samples]
    fixed, per_token, per_context = _nonnegative_least_squares(rows, seconds)
    return StepFit(Fit(fixed, per_token), per_context)


def fit_line(samples: Sequence[tuple[int, float]]) -> Fit:
    """Line through (tokens, seconds).

    Raises ValueError for fewer than two different sizes or for nonsense numbers.
    """
    return _fit([(tokens, 0, seconds) for tokens, seconds in samples], 2)


def fit_prefill(samples: Sequence[tuple[int, int, float]]) -> Fit:
    """Prefill cost through samples of (new tokens, context tokens, seconds), one layer each.

    What a context costs besides its pairs shows when different numbers of new tokens are behind
    contexts; from other samples it is not fitted. Raises ValueError for fewer than three different
    (new, context) or for nonsense numbers.
    """
    behind = {new for new, context, _ in samples if context}
    return _fit(samples, 4 if len(behind) > 1 else 3)


def _fit(samples: Sequence[tuple[int, int, float]], coefficients: int) -> Fit:
    """The first 2, 3 or 4 coefficients of a `Fit`."""
    _check(samples, min(coefficients, 3))
    seconds = [second for _, _, second in samples]
    rows = [
        (1.0, new, new * (context + 0.5 * new), context)[:coefficients]
        for new, context, _ in samples
    ]
    fixed, per_token, *rest = _nonnegative_least_squares(rows, seconds)
    per_pair, per_context = (*rest, 0.0, 0.0)[:2]
    return Fit(fixed, per_token, per_pair, per_context=per_context, floor=min(seconds))


def _check(samples: Sequence[tuple[int, int, float]], needed: int) -> None:
    sizes = {(new, context) for new, context, _ in samples}
    if len(sizes) < needed:
        raise ValueError(f"a fit needs samples of {needed} different sizes, got {len(sizes)}")
    for new, context, second in samples:
        size = f"{new} tokens behind {context}"
        if new < 1 or context < 0:
            raise ValueError(f"a sample has the impossible size {size}")
        if not math.isfinite(second) or second <= 0:
            raise ValueError(f"the sample of {size} took {second} seconds; it must be positive")


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
