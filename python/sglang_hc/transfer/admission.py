"""Nobody is overtaken for long: which requests are passed over, and how often (AdmissionOrder).

The scheduler asks for each waiting request, in its order, whether it may be admitted. What it has
admitted is seen at the top of the next pass: who is gone from the queue without having left it.
With ready-first the queue is put in order before it is asked for. Belongs to the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_hc.policy.ready_first import MAX_OVERTAKEN, AdmissionOrder
from sglang_hc.policy.windows import departed

ARRANGED = 128
"""Requests at the head of the queue that ready-first puts in order; those behind stay behind."""

Readiness = Callable[[str], float | None]


class Admission:
    """Order and bound of one scheduler's admissions."""

    def __init__(self, *, ready_first: bool = False, bound: int = MAX_OVERTAKEN) -> None:
        """bound: passes in which others are admitted past a request."""
        self.ready_first = ready_first
        self._order: AdmissionOrder[str] = AdmissionOrder(bound, ready_first=ready_first)
        self._queue: list[str] = []
        self._waiting: list[str] = []
        self._left: set[str] = set()
        self._head: set[str] = set()
        self.arrivals = 0
        self.tickets: dict[str, int] = {}
        """Places in the order of arrival of the requests that wait."""

    def is_due(self, rid: str) -> bool:
        """The request may not be passed over any more."""
        return self._order.is_due(rid)

    def arrived(self, rid: str) -> None:
        """A request came to the end of the queue, perhaps not for the first time."""
        self.arrivals += 1
        self.tickets[rid] = self.arrivals

    def left(self, rid: str) -> None:
        """A request left the queue without being admitted."""
        self._left.add(rid)
        self.forget(rid)

    def forget(self, rid: str) -> None:
        """Nothing is to be remembered of this request. Nothing happens if it is unknown."""
        self._order.forget(rid)
        self.tickets.pop(rid, None)

    def asked(self, rid: str) -> None:
        """The scheduler comes to this request, which waited when the pass began."""
        if rid not in self._head:
            self._queue.append(rid)

    def arrange(self, head: Sequence[str], readiness: Readiness) -> list[str]:
        """The first ARRANGED of the queue, in the order SGLang would serve them, as ready-first
        does: due requests, then the ready ones, the cheapest to restore first, then those whose
        state is on the way."""
        self._queue, self._head = list(head), set(head)
        order = list(self._order.order(head, readiness))
        if len(order) < len(head):
            chosen = set(order)
            order += [rid for rid in head if rid not in chosen]
        return order

    def passed(self, waiting: Sequence[str]) -> list[str]:
        """A new pass begins, and `waiting` is what the last one left over. Returns whom it has
        admitted."""
        admitted: list[str] = []
        if waiting != self._waiting:
            admitted = self._admit(waiting)
            self._waiting = list(waiting)
        self._queue, self._head = [], set()
        self._left.clear()
        return admitted

    def _admit(self, waiting: Sequence[str]) -> list[str]:
        """Those the scheduler came to in the last pass, and that wait no more, were admitted."""
        if not self._queue:
            return []
        gone = departed(self._waiting, waiting)
        if gone is None:
            still = set(waiting)
            left = [rid for rid in self._waiting if rid not in still]
        else:
            left = [self._waiting[at] for at in gone]
        asked = set(self._queue) - self._left
        admitted = [rid for rid in left if rid in asked]
        self._order.admitted(self._queue, admitted)
        for rid in admitted:
            self.tickets.pop(rid, None)
        return admitted
