"""Who may be admitted past whom, and how often.

A request whose state is on its way is passed over without blocking those behind it. Each pass in
which a request behind it is admitted counts as one bypass. After `bound` bypasses the request is
due: it is no longer passed over, and is admitted with the state it has; the rest is recomputed. So
nobody is passed over in more than `bound` passes, whatever arrives.

The scheduler asks for each waiting request, in its order, whether it may be admitted. It does not
say whom it admits; that shows at the top of the next pass, in who has left the queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from sglang_hc.queue.requests import RequestTable, Serial

MAX_BYPASSED = 64
"""Passes in which others are admitted past a request because its state is on its way, or because
theirs is there. After that it goes first, with the state it has."""

ARRANGED = 128
"""Requests at the head of the queue that ready-first puts in order; those behind stay behind."""

ON_THE_WAY = math.inf
"""Readiness of a request whose state is being fetched."""

Readiness = Callable[[Serial], float]
"""Seconds to restore what a request has (0: on the device or nothing to restore), or ON_THE_WAY."""


class Admission:
    """Order and bound of one scheduler's admissions. Belongs to the scheduler thread.

    The bound holds if the scheduler admits requests in the order in which it asks for them, and
    stops at the first that does not fit.
    """

    def __init__(
        self, requests: RequestTable, *, ready_first: bool = False, bound: int = MAX_BYPASSED
    ) -> None:
        """bound: passes in which others are admitted past a request."""
        self.ready_first = ready_first
        self._requests = requests
        self._bound = bound
        self._asked: dict[Serial, None] = {}

    def must_admit(self, name: Serial) -> bool:
        """The request may not be passed over any more."""
        record = self._requests.get(name)
        return (record.bypassed if record is not None else 0) >= self._bound

    def order(self, queue: Sequence[Serial], readiness: Readiness) -> list[Serial]:
        """The queue as ready-first serves it: due requests, then the ready ones, the cheapest to
        restore first, then those whose state is on its way. O(n log n). Changes nothing."""
        bound = self._bound
        due = [
            name
            for name, record in zip(queue, map(self._requests.get, queue), strict=True)
            if (record.bypassed if record is not None else 0) >= bound
        ]
        if due:
            first = set(due)
            queue = [name for name in queue if name not in first]
        return [*due, *sorted(queue, key=readiness)]  # stable: queue order among equals

    def arrange(self, head: Sequence[Serial], readiness: Readiness) -> list[Serial]:
        """The first ARRANGED of the queue in the `order` of ready-first. They count as asked in the
        order of the queue: who is served before them in the new order bypasses them."""
        self._asked = dict.fromkeys(head)
        return self.order(head, readiness)

    def asked(self, name: Serial) -> None:
        """The scheduler asks for this request, which waited when the pass began."""
        self._asked.setdefault(name)

    def left(self, name: Serial) -> None:
        """A request left the queue without being admitted, or is over."""
        self._asked.pop(name, None)

    def admitted(self, departed: Iterable[Serial]) -> list[Serial]:
        """A new pass begins, and `departed` have left the queue in the last one. Returns those that
        were admitted: the scheduler had asked for them."""
        asked, self._asked = self._asked, {}
        admitted = [name for name in departed if name in asked]
        if admitted:
            self.count(asked, admitted)
        return admitted

    def count(self, asked: Iterable[Serial], admitted: Collection[Serial]) -> None:
        """Of `asked`, in the order of the queue, `admitted` were admitted in this pass; whoever
        stands before one of them was bypassed."""
        still = set(admitted)
        for name in asked:
            if not still:
                return
            if name in still:
                still.remove(name)
            else:
                self._requests[name].bypassed += 1
