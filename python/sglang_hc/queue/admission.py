"""No request is bypassed for long: who is passed over, and how often (AdmissionOrder).

The scheduler asks for each waiting request, in its order, whether it may be admitted. It does not
say whom it admits; that shows at the top of the next pass, in who is no longer in the queue and was
not aborted. With ready-first the queue is put in order before the scheduler asks. Belongs to the
scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_hc.queue.ready_first import MAX_BYPASSED, AdmissionOrder
from sglang_hc.queue.requests import WaitingTable
from sglang_hc.queue.windows import departed

ARRANGED = 128
"""Requests at the head of the queue that ready-first puts in order; those behind stay behind."""

Readiness = Callable[[str], float | None]


class Admission:
    """Order and bound of one scheduler's admissions."""

    def __init__(
        self,
        requests: WaitingTable[str],
        *,
        ready_first: bool = False,
        bound: int = MAX_BYPASSED,
    ) -> None:
        """bound: passes in which others are admitted past a request."""
        self.ready_first = ready_first
        self._order: AdmissionOrder[str] = AdmissionOrder(requests, bound, ready_first=ready_first)
        self._queue: list[str] = []
        self._waiting: list[str] = []
        self._left: set[str] = set()
        self._head: set[str] = set()

    def is_due(self, rid: str) -> bool:
        """The request may not be passed over any more."""
        return self._order.is_due(rid)

    def left(self, rid: str) -> None:
        """A request left the queue without being admitted, or is over."""
        self._left.add(rid)
        self._order.forget(rid)

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
        """The requests that the scheduler asked for in the last pass and that no longer wait."""
        if not self._queue:
            return []
        gone = departed(self._waiting, waiting)
        if gone is None:
            still = set(waiting)
            left = [rid for rid in self._waiting if rid not in still]
        else:
            left = [self._waiting[at] for at in gone]
        asked = [rid for rid in self._queue if rid not in self._left]
        candidates = set(asked)
        admitted = [rid for rid in left if rid in candidates]
        self._order.admitted(asked, admitted)
        return admitted
