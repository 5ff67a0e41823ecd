"""Nobody is overtaken for long: which requests are passed over, and how often (AdmissionOrder).

The scheduler asks for each waiting request, in its order, whether it may be admitted. What it has
admitted is seen at the top of the next pass: who is gone from the queue without having left it.
With ready-first the queue is put in order before it is asked for. Belongs to the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_hc.policy.ready_first import AdmissionOrder

MAX_OVERTAKEN = 64
"""Passes in which others are admitted past a request because its state is on the way, or because
theirs is there. After that it goes first, with the state it has."""

ARRANGED = 256
"""Requests at the head of the queue that ready-first puts in order; those behind stay behind."""

Readiness = Callable[[str], float | None]


class Admission:
    """Order and bound of one scheduler's admissions."""

    def __init__(self, *, ready_first: bool = False, bound: int = MAX_OVERTAKEN) -> None:
        """bound: passes in which others are admitted past a request."""
        self.ready_first = ready_first
        self._order: AdmissionOrder[str] = AdmissionOrder(bound, ready_first=ready_first)
        self._queue: list[str] = []
        self._left: set[str] = set()
        self._arranged = False
        self._tickets: dict[str, int] = {}
        self._arrivals = 0

    def is_due(self, rid: str) -> bool:
        """The request may not be passed over any more."""
        return self._order.is_due(rid)

    def arrived(self, rid: str) -> None:
        """A request came to the end of the queue, perhaps not for the first time."""
        self._arrivals += 1
        self._tickets[rid] = self._arrivals

    def left(self, rid: str) -> None:
        """A request left the queue without being admitted."""
        self._left.add(rid)
        self.forget(rid)

    def forget(self, rid: str) -> None:
        """Nothing is to be remembered of this request. Nothing happens if it is unknown."""
        self._order.forget(rid)
        self._tickets.pop(rid, None)

    def asked(self, rid: str) -> None:
        """The scheduler comes to this request in its pass."""
        if not self._arranged:
            self._queue.append(rid)

    def ticket(self, rid: str) -> int:
        """Place in the order of arrival; requests that were not announced come last."""
        return self._tickets.get(rid, self._arrivals + 1)

    def arrange(self, queue: Sequence[str], readiness: Readiness) -> list[str]:
        """`queue`, in the order SGLang would serve it, as ready-first serves it.

        Due requests first, then the ready ones, the cheapest to restore first, then those whose
        state is on the way, then what is behind the first ARRANGED.
        """
        self._queue, self._arranged = list(queue), True
        head = self._queue[:ARRANGED]
        order = list(self._order.order(head, readiness))
        ordered = set(order)
        return order + [r for r in head if r not in ordered] + self._queue[ARRANGED:]

    def passed(self, waiting: Sequence[str]) -> None:
        """A new pass begins, and `waiting` is what the last one left over."""
        if self._queue:
            still = set(waiting)
            admitted = [r for r in self._queue if r not in still and r not in self._left]
            self._order.admitted(self._queue, admitted)
            for rid in admitted:
                self._tickets.pop(rid, None)
        self._queue = []
        self._arranged = False
        self._left.clear()
