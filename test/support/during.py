"""What a test does to an engine while it runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from support.core import Core


def when(core: Core, condition: Callable[[], bool], action: Callable[[], None]) -> list[bool]:
    """Call `action` once, at the first scheduling pass at which `condition` holds."""
    called: list[bool] = []

    def receive() -> list[Any]:
        if not called and condition():
            called.append(True)
            action()
        return core.receive()

    core.scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
    return called
