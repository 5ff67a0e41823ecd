"""`--hc-schedule ready-first`: the waiting queue in the order in which its state is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_hc.srt.tree_backend import HcRadixCache
from sglang_hc.transfer.admission import Admission


def calc_priority(
    original: Callable[..., Any], self: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any
) -> None:
    """AROUND SchedulePolicy.calc_priority: SGLang's order first, then ours over it.

    SGLang leaves a queue that is first come, first served as it is, so it gets it in the order of
    arrival.
    """
    tree = self.tree_cache
    if not isinstance(tree, HcRadixCache) or not tree.admission.ready_first:
        original(self, waiting_queue, *args, **kwargs)
        return
    ticket = tree.admission.ticket
    waiting_queue.sort(key=lambda req: ticket(req.rid))
    original(self, waiting_queue, *args, **kwargs)
    arrange(waiting_queue, tree.admission, tree.readiness)


def arrange(
    waiting_queue: list[Any], admission: Admission, readiness: Callable[[str], float | None]
) -> None:
    """Put SGLang's list in order, in place."""
    requests = {req.rid: req for req in waiting_queue}
    if len(requests) == len(waiting_queue):  # two requests of one name keep their order
        order = admission.arrange(list(requests), readiness)
        waiting_queue[:] = [requests[rid] for rid in order]
