"""Waiting for what happens in another thread or process, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

HANGS_S = 300.0
"""Only what never comes takes so long: below the limit of a test (pyproject.toml), so that the test
itself says what it waited for, and far above what a loaded machine needs."""


def until(
    what: Callable[[], object],
    step: Callable[[], object] = lambda: None,
    *,
    pause: float = 0.001,
    show: Callable[[], object] = lambda: "",
    limit: float = HANGS_S,
) -> None:
    """Take steps until something is true, `pause` seconds apart. show: what a failure tells.
    limit: seconds after which it does."""
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end, f"it never came {show()}"
        step()
        time.sleep(pause)


def in_time() -> float:
    """A deadline on `time.monotonic` for an operation that is to succeed."""
    return time.monotonic() + HANGS_S


def is_over(pid: int) -> bool:
    """Whether a process has ended; whoever inherited it may not have looked yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"
