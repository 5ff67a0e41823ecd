"""How long an idle disk takes for some blocks, from when they were asked for and when they came."""

from __future__ import annotations

from collections.abc import Callable

Observed = Callable[[int, float], None]
"""Told of (blocks, seconds)."""


class ReadWatch:
    """A span of reads begins when the first is asked for and ends when none is under way.

    It is told of only if nothing disturbed it: no write, no failure, no read from elsewhere. Times
    are on `time.monotonic`, which is one clock for all processes of a machine.
    """

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._began = 0.0
        self._ended = 0.0
        self._blocks = 0
        self._under_way = 0
        self._is_clean = False

    def asked(self, blocks: int, now: float, *, idle: bool) -> None:
        """Reads are submitted. idle: nothing is being written."""
        if not self._under_way:
            self._began, self._blocks, self._is_clean = now, 0, True
        self._is_clean = self._is_clean and idle
        self._blocks += blocks
        self._under_way += blocks

    def disturbed(self) -> None:
        """Something else uses the disk now."""
        self._is_clean = False

    def came(self, at: float | None, *, good: bool) -> None:
        """A read is over since `at`, None where that is not known. good: the disk served it."""
        self._under_way -= 1
        if at is None or not good:
            self._is_clean = False
        else:
            self._ended = max(self._ended, at)
        if not self._under_way and self._is_clean:
            self._observed(self._blocks, self._ended - self._began)
