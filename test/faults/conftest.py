"""Fixtures of the fault tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.disk_store import MEMORY

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


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: these tests need no real sync."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)
