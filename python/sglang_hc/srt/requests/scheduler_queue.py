"""The requests SGLang's scheduler has queued, as the tiers below the device see them.

SGLang tells the tree of every request that is queued and asks it before it admits one, both by a
handle of the request. This room finds the request that is meant, looks at the queue once per
scheduling pass, and puts the questions to the tiers. Belongs to the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hc.queue.admission import ARRANGED
from sglang_hc.queue.queue_view import QueueView
from sglang_hc.queue.requests import QueuedPrompt, Serial, departed, without
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.requests.images import packed
from sglang_hc.srt.requests.namespaces import keeps_state
from sglang_hc.srt.requests.overflow import dropped_of, earlier_of
from sglang_hc.srt.requests.self_test import is_of_test
from sglang_hc.tiers.trace import Recorder
from sglang_hc.tree.identity import Prefix


class SchedulerQueue:
    """Who waits, and what each needs.

    Requests that SGLang queued without matching them first are not known here: they are admitted
    with what the device and the host have.
    """

    def __init__(
        self,
        queue: QueueView,
        on_device: Callable[[RadixKey], int],
        recorder: Recorder | None = None,
    ) -> None:
        """on_device: tokens of a key that the device has now. recorder: is told who comes, waits
        on, and leaves without being admitted."""
        self._view = queue
        self._recorder = recorder
        self._on_device = on_device
        self._arranged = False
        self._queue: list[Any] = []
        self._arrived: list[Any] = []
        """Known requests that were queued since the last look."""
        self._order: tuple[Serial, ...] = ()
        """The known requests of `_queue`, the queue at the last look, in its order."""
        self._turns: Iterator[Any] = iter(())
        """The queue from the request on that SGLang asks for next."""
        self.last_matched: Any = None
        """The request of the last match, until it is queued: SGLang does both in a row."""
        self.last_asked: Any = None
        """The request of the last `ready`; None for one that was not found."""

    def on_schedule_step(self, queue: list[Any], decoding: int) -> None:
        """Top of a scheduling pass over SGLang's waiting requests: what they need is kept and
        fetched. decoding: requests that decode meanwhile."""
        if self._arranged:  # as it was before
            self._arranged = False
            arrival = self._view.requests.arrival
            queue[:ARRANGED] = sorted(queue[:ARRANGED], key=lambda req: arrival(serial_of(req)))
        self._update(queue)
        self._view.on_schedule_step(self._order, decoding)

    def first(self, count: int) -> list[Any]:
        """The first known requests of the queue, so many at most."""
        known = self._view.requests
        return list(islice((req for req in self._queue if serial_of(req) in known), count))

    def has(self, request: Serial) -> bool:
        """Whether a request waits, or meets its history."""
        return request in self._view.requests or self._view.meetings.of(request) is not None

    def is_fetching(self, request: Serial) -> bool:
        """Whether blocks of a waiting request are on their way to host memory."""
        return self._view.requests.is_fetching(request)

    def look_at(self, request: Serial) -> QueuedPrompt:
        """What a waiting request is."""
        return self._view.sources.look_at(request)

    def arrange(self, queue: list[Any]) -> None:
        """SGLang is about to ask for the requests of the queue in turn. With ready-first the first
        ARRANGED of them are put in its order, until the next pass."""
        self._turns = iter(queue)
        admission = self._view.admission
        if not admission.ready_first:
            return
        head = {serial_of(req): req for req in queue[:ARRANGED]}
        if self._view.requests.knows(head.keys()):
            costs = self._view.readiness(head)
            before = list(head)
            order = admission.arrange(before, costs)
            if order != before:
                queue[:ARRANGED] = [head[request] for request in order]
                self._arranged = True

    def matched(self, req: Any) -> None:
        """A request was matched; it may be queued next."""
        self.last_matched = req

    def queued(self, handle: Any) -> None:
        """The request that was matched last was queued, perhaps not for the first time."""
        req, self.last_matched = self.last_matched, None
        if req is None or fields.handle_of(req) is not handle:
            return
        # What is stored for the tokens of others is not their state.
        if keeps_state(req) and not fields.stays_out_of_tree(req):
            self._arrived.append(req)
            if self._recorder is not None and not is_of_test(fields.namespace_of(req)):
                self._recorder.arrived(serial_of(req), _prompt_of(req))
            self._view.arrived(serial_of(req), partial(self._look_at, req))
            dropped = dropped_of(req)
            if dropped and not fields.was_retracted(req):
                self._view.counters["overflow_requests"] += 1
                self._view.counters["overflow_dropped_tokens"] += dropped

    def ready(self, handle: Any) -> bool:
        """Whether the request, whose turn it is, may be admitted in this pass. SGLang asks in the
        order of the queue, and passes over some without asking."""
        turns = (req for req in self._turns if fields.handle_of(req) is handle)
        self.last_asked = next(turns, None)
        if self.last_asked is None or self.may_run(self.last_asked):
            return True
        if self._recorder is not None:
            self._recorder.passed_over(serial_of(self.last_asked))
        return False

    def may_run(self, req: Any) -> bool:
        """As `ready`, for the request itself."""
        request = serial_of(req)
        return request not in self._view.requests or self._view.ready(request)

    def take_loaded(self) -> int:
        """Tokens that came from disk for the request of the last `ready`; asked once."""
        return 0 if self.last_asked is None else self._view.take_loaded(serial_of(self.last_asked))

    def give_up(self, req: Any) -> None:
        """Nothing is fetched or kept for a waiting request any more: it is admitted with what is
        there."""
        if serial_of(req) in self._view.requests:
            self._end(serial_of(req))
            self._queue, self._order = [], ()

    def give_up_handle(self, handle: Any) -> None:
        """As `give_up`, of the request that SGLang tells of by this handle."""
        for req in [*self._queue, *self._arrived]:
            if fields.handle_of(req) is handle:
                self.give_up(req)

    def answered(self, req: Any) -> None:
        """A request has its whole reply."""
        if dropped_of(req):
            self._view.counters["overflow_recomputed_tokens"] += fields.computed_prompt_tokens(req)

    def finished(self, req: Any, blocks: int) -> None:
        """A request of so many blocks is over, or retracted."""
        self._view.finished(serial_of(req), blocks, comes_back=not fields.is_ending(req))

    def _update(self, queue: list[Any]) -> None:
        """Bring `_order` up to the queue. Only requests that are new in it are touched."""
        arrived, self._arrived = self._arrived, []
        if queue == self._queue and not arrived:
            return
        left = departed(self._queue, queue)
        gone = self._queue if left is None else [self._queue[at] for at in left]
        new = [*map(serial_of, queue if left is None else queue[len(self._queue) - len(left) :])]
        tail = set(new)
        self._end_aborted(
            req for req in (*gone, *arrived) if serial_of(req) not in tail and req not in queue
        )
        stayed: list[Serial] = []
        if left is not None and len(self._order) == len(self._queue):
            stayed = without(self._order, left)
        elif left is not None:
            new = [*map(serial_of, queue)]
        known = self._view.requests
        self._order = (*stayed, *(request for request in new if request in known))
        self._queue = queue.copy()

    def _end_aborted(self, gone: Iterable[Any]) -> None:
        """End what is known of those who left the queue without being admitted. Who was admitted
        has a row in SGLang's pool, or is over and not known."""
        for req in gone:
            request = serial_of(req)
            if request in self._view.requests and fields.row_of(req) is None:
                self._end(request)

    def _end(self, request: Serial) -> None:
        if self._recorder is not None:
            self._recorder.gone(request)
        self._view.left(request)

    def _look_at(self, req: Any) -> QueuedPrompt:
        key = RadixKey(fields.prompt_of(req), fields.namespace_of(req))
        return QueuedPrompt(_prompt_of(req), partial(self._on_device, key), earlier_of(req))


def _prompt_of(req: Any) -> Prefix:
    return Prefix(fields.namespace_of(req), packed(req, fields.prompt_of(req)))
