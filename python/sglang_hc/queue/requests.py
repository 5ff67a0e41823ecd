"""One record per waiting request, and the table that owns them (AttentionStore section 3.3).

What the tiers know of a request while it waits is here and nowhere else: its place in the queue,
the blocks it needs, which of them are on their way, how long it may be waited for, and how often
others were admitted past it. Look-ahead, prefetch and admission are functions over these records,
in the server and in the simulator. A record begins when its request is queued and ends when the
request leaves the queue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

from sglang_hc.tree.cuts import EarlierCuts, EarlierPath
from sglang_hc.tree.identity import BlockPath, Prefix

T = TypeVar("T")

Serial: TypeAlias = int
"""Name of a request in a server: a number that no other request of its scheduler ever has. Clients
choose the `rid` of a request, and two that are alive may share one."""

DEPARTED_WITHIN = 128
"""Places from the head of a queue within which requests are expected to leave it."""


class QueuedPrompt(NamedTuple):
    """A waiting request: its prompt, and how many tokens of it the device has when it is asked.

    earlier: what a cut prompt was cut to before, where its state may move; None for any other.
    """

    prompt: Prefix
    on_device: Callable[[], int]
    earlier: EarlierCuts | None = None


def not_told() -> QueuedPrompt:
    """Stands for a request of which only the place in the queue is known."""
    raise LookupError("nobody has said what this request is")


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """What is known of one waiting request.

    arrival: its place in the order of arrival, from 1 on; 0 for one that was never queued here.
    look: says what it is; asked once. Raises LookupError for one that was never queued here.
    waiting: what it is; None until somebody has asked.
    needs: identities of the blocks it can use; None until it enters the look-ahead window.
    path: of its prompt; None until `needs` are known.
    earlier: where the blocks of a cut prompt were before, if they may move from there.
    rank: grows along the queue; None outside the look-ahead window.
    awaits: blocks on their way to host memory that it waits for.
    last_block: the last block of its path that is in host memory or on its way there.
    patience: seconds that the blocks on their way can save; None when none are.
    wait_until: end of its wait, once its turn has come and it waits.
    fetches: fetches that it has waited for at its turn.
    fetches_over: nothing more is fetched for it; it is served with what is there.
    doubted: a fetch for it was not worth it, and was counted as a refusal or tried.
    loaded_tokens: tokens that came from disk while it waited.
    restore_seconds: cost to restore what it has; None until it is asked for.
    bypassed: passes in which a request behind it was admitted before it.
    """

    arrival: int = 0
    look: Callable[[], QueuedPrompt] = not_told
    waiting: QueuedPrompt | None = None
    needs: Sequence[bytes] | None = None
    path: BlockPath | None = None
    earlier: Sequence[EarlierPath] = ()
    rank: float | None = None
    awaits: set[bytes] = field(default_factory=set)
    last_block: bytes | None = None
    patience: float | None = None
    wait_until: float | None = None
    fetches: int = 0
    fetches_over: bool = False
    doubted: bool = False
    loaded_tokens: int = 0
    restore_seconds: float | None = None
    bypassed: int = 0


class RequestTable:
    """The records of all waiting requests by name, and who waits for which block.

    Belongs to the scheduler thread. Which blocks are on their way at all, `tree.promotions` knows.
    """

    def __init__(self) -> None:
        self._records: defaultdict[Serial, QueuedRequest] = defaultdict(QueuedRequest)
        self.get = self._records.get
        """The record of a request; None for one that is not known. Asked often in every pass."""
        self._arrivals = 0
        self._waiters: dict[bytes, set[Serial]] = {}

    def __getitem__(self, name: Serial) -> QueuedRequest:
        """The record of a request; a new one for a request that was not queued here."""
        return self._records[name]

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def knows(self, names: Set[Serial]) -> bool:
        """Whether there is a record of each of these requests."""
        return names <= self._records.keys()

    def __iter__(self) -> Iterator[Serial]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def arrived(self, name: Serial, look: Callable[[], QueuedPrompt] = not_told) -> QueuedRequest:
        """The request was queued, perhaps again: a new record begins. look: says what it is."""
        self.left(name)
        self._arrivals += 1
        record = self._records[name] = QueuedRequest(self._arrivals, look)
        return record

    def arrival(self, name: Serial) -> int:
        """Its place in the order of arrival; behind all others for one that is not known."""
        record = self._records.get(name)
        return record.arrival if record is not None else self._arrivals + 1

    def left(self, name: Serial) -> None:
        """The request was admitted, was aborted, or is over: its record ends here. Nothing happens
        if it is unknown. `LookAhead.leave` calls this, after the request has left the window."""
        if name in self._records:
            self.stop_waiting(name)
            del self._records[name]

    # -- blocks on their way to host memory ------------------------------------------------------

    def wait(self, name: Serial, block_ids: Iterable[bytes]) -> None:
        """The request waits for blocks that are on their way."""
        awaits, waiters = self[name].awaits, self._waiters
        for block_id in block_ids:
            names = waiters.get(block_id)
            if names is None:
                waiters[block_id] = {name}
            else:
                names.add(name)
            awaits.add(block_id)

    def is_fetching(self, name: Serial) -> bool:
        """Whether blocks that this request waits for are on their way."""
        record = self._records.get(name)
        return record is not None and bool(record.awaits)

    def ended(self, block_ids: Iterable[bytes]) -> dict[Serial, int]:
        """Blocks have come, or will not. Returns who waited for any, and for how many of them."""
        waited: dict[Serial, int] = {}
        for block_id in block_ids:
            for name in self._waiters.pop(block_id, ()):
                self._records[name].awaits.discard(block_id)
                waited[name] = waited.get(name, 0) + 1
        return waited

    def stop_waiting(self, name: Serial) -> None:
        """The request waits no longer for the blocks on their way."""
        record = self[name]
        for block_id in record.awaits:
            names = self._waiters[block_id]
            names.remove(name)
            if not names:
                del self._waiters[block_id]
        record.awaits.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless both directions of who-waits-for-what agree."""
        for block_id, names in self._waiters.items():
            assert names and all(block_id in self._records[name].awaits for name in names)
        for name, record in self._records.items():
            assert all(name in self._waiters[block_id] for block_id in record.awaits)


def departed(old: Sequence[T], new: Sequence[T]) -> list[int] | None:
    """Places in `old` of those that have left the queue, which else has only grown at its tail.

    None for any other change, and when somebody behind the first DEPARTED_WITHIN has left. Slices
    are compared in C; the loop in Python ends at the last one that has left.
    """
    gone: list[int] = []
    at, compare = 0, True
    while at < len(old):
        place = at - len(gone)
        left = place == len(new) or old[at] != new[place]
        if left:
            gone.append(at)
        elif compare and old[at:] == new[place : place + len(old) - at]:
            break
        if at == DEPARTED_WITHIN:
            return None
        compare = left
        at += 1
    back = new[len(old) - len(gone) :]
    return gone if all(old[at] not in back for at in gone) else None


def without(items: Sequence[T], places: Sequence[int]) -> list[T]:
    """A copy of `items` that lacks those at `places`, which ascend."""
    rest = list(items)
    for at in reversed(places):
        del rest[at]
    return rest
