"""How fast a tier below host memory is, seen from the reads that were asked for."""

from __future__ import annotations

from collections.abc import Callable

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.outcome import Outcome

OnRead = Callable[[SourceTier, int, float], None]
"""Told of (tier, blocks, seconds) that an idle source took."""


def not_observed(tier: SourceTier, blocks: int, seconds: float) -> None:
    """For whoever has no costs to correct."""


class ReadWatch:
    """Reads from one tier. A span of them begins when the first is asked for and ends when none is
    under way.

    `observed` is told of (tier, blocks, seconds), only if nothing disturbed it: no write and no
    failure. Reads that came too late are left out, but what came before them counts: so the speed
    of a source is known even if it is too slow for all that it was asked for. Times are on
    `time.monotonic`.
    """

    def __init__(self, tier: SourceTier, observed: OnRead) -> None:
        self.under_way = 0
        self.ended = 0.0
        """When the tier last answered for a block."""
        self._tier = tier
        self._observed = observed
        self._began = 0.0
        self._blocks = 0
        self._is_clean = False

    def asked(self, blocks: int, now: float, *, idle: bool) -> None:
        """Reads are submitted. idle: nothing is being written."""
        if not self.under_way:
            self._began, self._blocks, self._is_clean = now, 0, True
        self._is_clean = self._is_clean and idle
        self._blocks += blocks
        self.under_way += blocks

    def disturbed(self) -> None:
        """Something else uses the disk now."""
        self._is_clean = False

    def came(self, outcome: Outcome, at: float | None, now: float) -> None:
        """A read is over since `at`, None where that is not known."""
        self.under_way -= 1
        if outcome is Outcome.TIMED_OUT:
            self._blocks -= 1
        else:
            self._is_clean = self._is_clean and outcome is Outcome.OK and at is not None
            self.ended = max(self.ended, now if at is None else at)
        if self._blocks and self._is_clean and not self.under_way:
            self._observed(self._tier, self._blocks, self.ended - self._began)
