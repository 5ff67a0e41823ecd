"""In which order waiting requests may be admitted when some wait for their state.

A request whose state is on the way is passed over without blocking those behind it. Every pass in
which a request behind it was admitted counts; after `max_passes` of them the request is due: it
stands before all that are not, may no longer be passed over, and is admitted with the state it has
(the rest is recomputed). So nobody is passed over in more than `max_passes` passes, whatever
arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Generic, TypeVar

from sglang_hc.queue.requests import WaitingTable

K = TypeVar("K", bound=Hashable)

MAX_BYPASSED = 64
"""Passes in which others are admitted past a request because its state is on the way, or because
theirs is there. After that it goes first, with the state it has."""

ON_THE_WAY = None
"""Readiness of a request whose state is being fetched."""


class AdmissionOrder(Generic[K]):
    """Queue order with the unready left out; with `ready_first`, cheapest restoration first.

    The caller admits a prefix of what `order` returns (it stops at the first request that does not
    fit), then reports it with `admitted`. The bound holds under exactly this rule.
    """

    def __init__(
        self, requests: WaitingTable[K], max_passes: int, *, ready_first: bool = False
    ) -> None:
        if max_passes < 0:
            raise ValueError(f"max_passes must not be negative, got {max_passes}")
        self._max_passes = max_passes
        self._ready_first = ready_first
        self._requests = requests
        self._due: set[K] = set()

    def is_due(self, request: K) -> bool:
        """It was bypassed so often that it goes next."""
        return not self._max_passes or request in self._due

    def order(self, queue: Sequence[K], readiness: Callable[[K], float | None]) -> Iterator[K]:
        """Requests that may be admitted in this pass, first first. Changes nothing.

        `readiness`: seconds to restore what the request has (0: on the device or nothing to
        restore), ON_THE_WAY while a fetch for it runs. Lazy: costs what is taken, and what is
        passed over; with `ready_first` O(n log n).
        """
        if not self._max_passes:
            yield from queue
            return
        due = self._due
        if due:
            yield from (request for request in queue if request in due)
        if not self._ready_first:
            for request in queue:
                if request not in due and readiness(request) is not ON_THE_WAY:
                    yield request
            return
        others = [request for request in queue if request not in due] if due else queue
        pairs = zip(map(readiness, others), others, strict=True)
        ready = [(cost, request) for cost, request in pairs if cost is not ON_THE_WAY]
        ready.sort(key=itemgetter(0))  # stable: queue order among equals
        for _, request in ready:
            yield request

    def admitted(self, queue: Sequence[K], chosen: Iterable[K]) -> None:
        """The pass over `queue` has admitted `chosen`, a prefix of its order."""
        gone = set(chosen)
        remaining = len(gone)
        for request in queue:
            if not remaining:
                break
            if request in gone:
                remaining -= 1
                self._due.discard(request)
            else:
                record = self._requests[request]
                record.bypassed += 1
                if record.bypassed >= self._max_passes:
                    self._due.add(request)

    def forget(self, request: K) -> None:
        """The request left the queue. Nothing happens if it is unknown."""
        self._due.discard(request)
