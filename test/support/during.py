"""What a test does to an engine while it runs."""

from __future__ import annotations

from collections.abc import Callable


class When:
    """For `Core.run`: calls `action` once, in the first pass at which `condition` holds."""

    def __init__(self, condition: Callable[[], bool], action: Callable[[], object]) -> None:
        self._condition, self._action = condition, action
        self.called = False

    def __call__(self, number: int) -> None:
        if not self.called and self._condition():
            self.called = True
            self._action()
