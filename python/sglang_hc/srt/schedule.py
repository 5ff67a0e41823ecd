"""`--hc-schedule ready-first`: the waiting queue in the order in which its state is there."""

from __future__ import annotations

from typing import Any

from sglang_hc.srt.tree_backend import HcRadixCache


def arrange(result: None, self: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any) -> None:
    """AFTER SchedulePolicy.calc_priority: our order over the first of SGLang's, in place.

    The order of arrival, which SGLang leaves as it is where it serves first come, first served, is
    restored at the top of each pass (`WaitingRequests.look`).
    """
    if isinstance(self.tree_cache, HcRadixCache):
        self.tree_cache.waiting.arrange(waiting_queue)
