"""Stops asking a disk that keeps failing, and tries again later."""

from __future__ import annotations

import threading
from collections.abc import Callable

FAILURES_TO_OPEN = 8
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0


class CircuitBreaker:
    """After FAILURES_TO_OPEN failures in a row nothing is let through for a while.

    The pause doubles each time the first attempt after it fails too. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = _FIRST_PAUSE_S
        self._until = 0.0

    def allows(self) -> bool:
        """Whether an operation may be tried now. Cheap; takes no lock."""
        return not self._until or self._clock() >= self._until

    def succeeded(self) -> bool:
        """An operation reached the disk and came back. True when this one ends the pauses."""
        if not self._failures and not self._until:
            return False
        with self._lock:
            ended = self._until > 0.0
            self._failures, self._pause, self._until = 0, _FIRST_PAUSE_S, 0.0
            return ended

    def failed(self) -> bool:
        """An operation failed with an I/O error. True when this one starts a pause."""
        with self._lock:
            self._failures += 1
            if self._failures < FAILURES_TO_OPEN and not self._until:
                return False
            if self._until and self._clock() < self._until:
                return False  # an operation that was under way when the pause began
            if self._until:
                self._pause = min(self._pause * 2, _LONGEST_PAUSE_S)
            self._until = self._clock() + self._pause
            self._failures = 0
            return True
