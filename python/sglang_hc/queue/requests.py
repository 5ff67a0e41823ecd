"""One record per waiting request, and the table that owns them (AttentionStore section 3.3).

What the tiers know of a request while it waits is here and nowhere else: the blocks it needs, how
far they have come, how long it may be waited for, how often others were admitted past it.
Look-ahead, prefetch and admission are functions over these records, in the server and in the
simulator. A record begins when its request is queued and ends when the request leaves the queue.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
"""Name of a request."""


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """What is known of one waiting request.

    arrival: its place in the order of arrival, from 1 on; 0 for one that was never queued here.
    source: the scheduler's own object for the request, for whoever looks at its prompt.
    needs, path: identities of the blocks it can use, and of the whole blocks of its prompt; None
    until they are asked for.
    last_block: the last block of its path that is in host memory or on its way there.
    patience: seconds that the blocks on their way can save; None when none are.
    wait_until: end of its wait, once its turn has come and it waits.
    fetches: fetches that it has waited for at its turn.
    settled: nothing more is fetched for it; it is served with what is there.
    doubted: a fetch for it was not worth it, and was counted as a refusal or tried.
    loaded_tokens: tokens that came from disk while it waited.
    restore_seconds: cost to restore what it has; None until it is asked for.
    bypassed: passes in which a request behind it was admitted before it.
    """

    arrival: int = 0
    source: Any = None
    needs: Sequence[bytes] | None = None
    path: Sequence[bytes] = ()
    last_block: bytes | None = None
    patience: float | None = None
    wait_until: float | None = None
    fetches: int = 0
    settled: bool = False
    doubted: bool = False
    loaded_tokens: int = 0
    restore_seconds: float | None = None
    bypassed: int = 0


class WaitingTable(Generic[K]):
    """The records of all waiting requests, by name. Belongs to the scheduler thread."""

    def __init__(self) -> None:
        self._records: dict[K, WaitingRequest] = {}
        self._arrivals = 0

    def __getitem__(self, name: K) -> WaitingRequest:
        """The record of a request; a new one for a request that was not queued here."""
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = WaitingRequest()
        return record

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def __iter__(self) -> Iterator[K]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def arrived(self, name: K) -> WaitingRequest:
        """The request was queued, perhaps again: nothing of what was known before counts."""
        self._arrivals += 1
        record = self._records[name] = WaitingRequest(self._arrivals)
        return record

    def arrival(self, name: K) -> int:
        """Its place in the order of arrival; behind all others for one that is not known."""
        record = self._records.get(name)
        return record.arrival if record is not None else self._arrivals + 1

    def left(self, name: K) -> None:
        """The request was admitted, was aborted, or is over. Nothing happens if it is unknown."""
        self._records.pop(name, None)
