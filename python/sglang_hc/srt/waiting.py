"""The requests SGLang's scheduler has queued, as the tiers below the device see them.

SGLang tells the tree of every request that is queued, asks it before it admits one, and says who
has left. This room keeps the requests by name, looks at the queue once per scheduling pass, and
puts the questions to the tiers. Belongs to the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hc.queue.admission import ARRANGED
from sglang_hc.queue.lookahead import QueueView
from sglang_hc.queue.requests import Waiting, departed, without
from sglang_hc.restore.read_buffer import ReadBuffer
from sglang_hc.srt.overflow import dropped_of, earlier_of
from sglang_hc.tree.identity import Prefix, pack_tokens


class WaitingRequests:
    """Who waits, and what each needs.

    Requests that SGLang queued without matching them first are not known here: they are admitted
    with what the device and the host have.
    """

    def __init__(
        self,
        queue: QueueView,
        read_buffer: ReadBuffer | None,
        on_device: Callable[[RadixKey], int],
    ) -> None:
        """on_device: tokens of a key that the device has now."""
        self._view = queue
        self._read_buffer = read_buffer
        self._on_device = on_device
        self._arranged = False
        self._queue: list[Any] = []
        self._order: tuple[str, ...] = ()
        """Names of the known requests of `_queue`, the queue at the last look, in its order."""
        self.last_matched: Any = None
        """The request of the last match; SGLang matches a request just before it queues it."""

    def on_schedule_step(self, queue: list[Any], decoding: int) -> None:
        """Top of a scheduling pass over SGLang's waiting requests: what they need is kept, fetched
        and copied early. decoding: requests that decode meanwhile."""
        if self._arranged:  # as it was before
            self._arranged = False
            arrival = self._view.requests.arrival
            queue[:ARRANGED] = sorted(queue[:ARRANGED], key=lambda req: arrival(req.rid))
        self._update(queue)
        self._view.on_schedule_step(self._order, decoding)
        if self._read_buffer is not None:
            self._read_buffer.on_schedule_step(self._order, self._view.look_at)

    def arrange(self, queue: list[Any]) -> None:
        """Put the first ARRANGED of the queue in ready-first's order, until the next pass."""
        admission = self._view.admission
        if not admission.ready_first:
            return
        head = {req.rid: req for req in queue[:ARRANGED]}
        if len(head) == min(ARRANGED, len(queue)) and self._view.requests.knows(head.keys()):
            costs = self._view.readiness(head)
            before = list(head)
            order = admission.arrange(before, costs)
            if order != before:
                queue[:ARRANGED] = [head[rid] for rid in order]
                self._arranged = True

    def matched(self, req: Any) -> None:
        """A request was matched; it may be queued next."""
        self.last_matched = req

    def queued(self, rid: str) -> None:
        """A request was queued, perhaps not for the first time."""
        if self.last_matched is not None and self.last_matched.rid == rid:
            self._view.arrived(rid, partial(self._look_at, self.last_matched))
            dropped = dropped_of(self.last_matched)
            if dropped and not self.last_matched.retracted_stain:
                self._view.counters["overflow_requests"] += 1
                self._view.counters["overflow_dropped_tokens"] += dropped

    def ready(self, rid: str) -> bool:
        """Whether the request, whose turn it is, may be admitted in this pass."""
        return rid not in self._view.requests or self._view.ready(rid)

    def left(self, rid: str) -> None:
        """A request left the queue without being admitted."""
        self._order_is_stale(rid)
        self._view.left(rid)

    def answered(self, req: Any) -> None:
        """A request has its whole reply."""
        if dropped_of(req):
            computed = len(req.origin_input_ids) - req.cached_tokens
            self._view.counters["overflow_recomputed_tokens"] += computed

    def finished(self, rid: str, blocks: int) -> None:
        """A request of so many blocks is over."""
        self._order_is_stale(rid)
        self._view.finished(rid, blocks)

    def _update(self, queue: list[Any]) -> None:
        """Bring `_order` up to the queue. Only requests that are new in it are touched."""
        if queue == self._queue:
            return
        left = departed(self._queue, queue) if len(self._order) == len(self._queue) else None
        stayed = without(self._order, left) if left is not None else []
        new = queue[len(stayed) :]
        known = self._view.requests
        self._order = (*stayed, *(req.rid for req in new if req.rid in known))
        self._queue = queue.copy()

    def _order_is_stale(self, rid: str) -> None:
        """A known request leaves. Another of its name may still be in the queue, unknown now."""
        if rid in self._view.requests:
            self._queue, self._order = [], ()

    def _look_at(self, req: Any) -> Waiting:
        key = RadixKey(req.full_untruncated_fill_ids, req.extra_key)
        prompt = Prefix(req.extra_key, pack_tokens(key.token_ids))
        return Waiting(prompt, partial(self._on_device, key), earlier_of(req))
