"""Running requests that make room for one of a higher priority (`--enable-priority-scheduling`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_hc.srt.engine.guard import tree_of


def preempt_to_schedule(
    original: Callable[..., bool], self: Any, req: Any, *args: Any, **kwargs: Any
) -> bool:
    """AROUND PrefillAdder.preempt_to_schedule: nobody makes room for a request that waits for its
    state."""
    tree = tree_of(self)
    if tree is None:
        return original(self, req, *args, **kwargs)
    if not tree.waiting.may_run(req):
        return False
    return original(self, req, *args, **kwargs)
