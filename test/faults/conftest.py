"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.scratch import faults, nothing_stays_open, scratch

__all__ = ["faults", "nothing_stays_open", "scratch"]

COUNTED = pytest.StashKey[list[str]]()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line about what a long test counted, at the end of the run."""
    return request.config.stash.setdefault(COUNTED, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(COUNTED, [])
    if lines:
        terminalreporter.section("counted")
    for line in lines:
        terminalreporter.write_line(line)
