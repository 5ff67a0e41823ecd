"""Running requests that make room for one of a higher priority (`--enable-priority-scheduling`).

SGLang puts them back into its queue only where the same pass admits somebody. With its own caches
it does, nearly always. Here the one they made room for may wait for its state, or a prompt that
meets its history may be given no chunk: then nobody is admitted.
"""

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
    tree.preempted = self.preempt_list
    return original(self, req, *args, **kwargs)


def get_new_batch_prefill(
    original: Callable[..., tuple[Any, Any]], self: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """AROUND Scheduler._get_new_batch_prefill_raw: whoever made room waits again, although nobody
    was admitted."""
    batch, running = original(self, *args, **kwargs)
    tree = tree_of(self)
    if tree is not None:
        preempted, tree.preempted = tree.preempted, []
        if batch is None:
            for req in preempted:
                self._add_request_to_queue(req)
    return batch, running
