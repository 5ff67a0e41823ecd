"""`--hc-schedule ready-first`: the waiting queue in the order in which its state is there."""

from __future__ import annotations

from typing import Any

from sglang_hc.srt.tree_backend import HcRadixCache
from sglang_hc.transfer.admission import ARRANGED


def arrange(result: None, self: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any) -> None:
    """AFTER SchedulePolicy.calc_priority: our order over the first of SGLang's, in place.

    The order of arrival, which SGLang leaves as it is where it serves first come, first served, is
    restored at the top of each pass (`WaitingRequests.look`).
    """
    tree = self.tree_cache
    if not isinstance(tree, HcRadixCache) or not tree.waiting.admission.ready_first:
        return
    waiting = tree.waiting
    requests = {req.rid: req for req in waiting_queue[:ARRANGED]}
    if len(requests) == min(ARRANGED, len(waiting_queue)):  # else two of one name: left as it is
        order = waiting.admission.arrange(list(requests), waiting.readiness)
        waiting_queue[:ARRANGED] = [requests[rid] for rid in order]
