"""Retention beside the eviction order: a time to live per block, and pins with expiry per session.

A pin keeps a session's blocks from being evicted while, say, a tool call runs. It always expires,
and a namespace can pin only half of what the others leave, so that nobody can take the tier.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from sglang_hc.policy.eviction import NextUse

K = TypeVar("K", bound=Hashable)
"""Whatever stands for a block in its tier."""


PINNED_SHARE = 0.5
"""Share of the host tier that pins may hold together: the other half always turns over."""

MAX_SESSIONS = 8192
"""Most sessions that may have a pin."""

MAX_PIN_S = 3600.0
"""Longest pin, in seconds."""

FEW_ENDS = 64
"""So many ends that say nothing any more are kept in any case."""


class TimeToLive(Generic[K]):
    """Blocks that nobody has used for `ttl` seconds (AttentionStore section 4.3.5).

    Times must not go backwards. O(1) per call, plus the expired blocks.
    """

    def __init__(self, ttl: float) -> None:
        if ttl <= 0:
            raise ValueError(f"time to live must be positive, got {ttl}")
        self.ttl = ttl
        self._used: OrderedDict[K, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def touch(self, block: K, now: float) -> None:
        """The block came in or was used."""
        self._used[block] = now
        self._used.move_to_end(block)

    def forget(self, block: K) -> None:
        """The block has left its tier. Nothing happens if it is unknown."""
        self._used.pop(block, None)

    def expired(self, now: float) -> list[K]:
        """Blocks whose time is over, oldest first. They stay until `forget`."""
        out: list[K] = []
        for block, used in self._used.items():
            if now - used < self.ttl:
                break
            out.append(block)
        return out


class PinLimitError(ValueError):
    """A pin beyond a bound. The message is for users."""


class Pinned(NamedTuple):
    """One session's pin, as it is shown. seconds: until it ends."""

    session: str
    blocks: int
    seconds: float


class _Pin(NamedTuple):
    blocks: set[bytes]
    expires: float
    weights: str | None


def share(most: int, others: int) -> int:
    """Of a bound on all, how much one namespace may have where others have so much: half of what
    they leave. However many namespaces somebody makes up, the next one still finds room."""
    return max(0, most - others) // 2


class SessionPins:
    """Which sessions pin which blocks, until when.

    Pinning a session again replaces its blocks and its expiry. A block's identity depends on its
    namespace, so sessions of one namespace only can share it; it then counts once. A call costs
    the blocks that it names, and O(log n) of n pins; `of` costs the pins of its namespace.
    """

    def __init__(
        self, max_total: int, max_seconds: float, max_sessions: int = MAX_SESSIONS
    ) -> None:
        """max_total, max_sessions: bounds of all blocks and sessions; see `share` for one
        namespace's. max_seconds: longest expiry that may be asked for."""
        if max_total < 0 or max_sessions < 0 or max_seconds <= 0:
            raise ValueError("pins need max_total and max_sessions >= 0 and max_seconds > 0")
        self._max_total = max_total
        self._max_sessions = max_sessions
        self._max_seconds = max_seconds
        self._pins: dict[str | None, dict[str, _Pin]] = {}
        """By namespace, which has one at least, and session."""
        self._count = 0
        self._held: Counter[str | None] = Counter()
        """How many blocks a namespace pins."""
        self._sessions: Counter[bytes] = Counter()
        """How many sessions pin a block; only blocks that some session pins."""
        self._ends: list[tuple[float, int, str | None, str]] = []
        """A heap of when pins end. Some of them have ended, or end later by now."""
        self._numbers = itertools.count()
        self._listeners: list[Callable[[bytes], None]] = []

    @classmethod
    def sized_for(cls, slots: int) -> SessionPins:
        """With the bounds for a host tier of so many blocks."""
        return cls(int(PINNED_SHARE * slots), MAX_PIN_S)

    def __len__(self) -> int:
        """Sessions that pin blocks."""
        return self._count

    @property
    def total_blocks(self) -> int:
        """Blocks that any session pins."""
        return len(self._sessions)

    def subscribe(self, listener: Callable[[bytes], None]) -> None:
        """Call `listener(block_id)` after each change of a block's `is_pinned`."""
        self._listeners.append(listener)

    def of(self, namespace: str | None, now: float) -> list[Pinned]:
        """The pins of one namespace, the first to end first."""
        self.expire(now)
        pins = [
            Pinned(session, len(pin.blocks), pin.expires - now)
            for session, pin in self._pins.get(namespace, {}).items()
        ]
        return sorted(pins, key=lambda pin: pin.seconds)

    def is_pinned(self, block_id: bytes) -> bool:
        """Whether any session pins this block. Call `expire` first when time has passed."""
        return block_id in self._sessions

    def held(self, namespace: str | None) -> int:
        """Blocks that the sessions of a namespace pin."""
        return self._held[namespace]

    def max_blocks(self, namespace: str | None) -> int:
        """Most blocks that the sessions of a namespace may pin now."""
        return share(self._max_total, self.total_blocks - self._held[namespace])

    def max_sessions(self, namespace: str | None) -> int:
        """Most sessions of a namespace that may have a pin now."""
        return share(self._max_sessions, self._count - len(self._pins.get(namespace, ())))

    def pin(
        self,
        namespace: str | None,
        session: str,
        blocks: Iterable[bytes],
        seconds: float,
        now: float,
        weights: str | None = None,
    ) -> None:
        """Pin `blocks`, which these weights made, for the session until now + seconds.

        Raises PinLimitError, and changes nothing, when the longest expiry would be passed, or when
        the namespace would have more blocks or sessions than before and than its bound.
        """
        if not 0 < seconds <= self._max_seconds:
            raise PinLimitError(
                f"pin of {seconds:g} s: give more than 0 and at most {self._max_seconds:g} s"
            )
        self.expire(now)
        wanted = set(blocks)
        pins = self._pins.get(namespace, {})
        old = pins.get(session)
        own = old.blocks if old is not None else set()
        if old is None and len(pins) >= (most := self.max_sessions(namespace)):
            raise PinLimitError(
                f"pin of session {session!r}: its namespace has {len(pins)} sessions with pins, "
                f"the bound is {most} now: unpin another session or wait for one to expire"
            )
        added = sum(block_id not in self._sessions for block_id in wanted)
        freed = sum(self._sessions[block_id] == 1 for block_id in own - wanted)
        count, most = self._held[namespace] + added - freed, self.max_blocks(namespace)
        if added > freed and count > most:
            raise PinLimitError(
                f"pin of session {session!r} needs {count} blocks in its namespace, the bound is "
                f"{most} now: unpin another session or wait for one to expire"
            )
        self._count += old is None
        self._pins.setdefault(namespace, pins)[session] = _Pin(wanted, now + seconds, weights)
        self._note_end(now + seconds, namespace, session)
        for block_id in sorted(wanted - own):  # in the same order in every process
            self._sessions[block_id] += 1
            if self._sessions[block_id] == 1:
                self._held[namespace] += 1
                self._announce(block_id)
        self._let_go(namespace, own - wanted)

    def unpin(self, namespace: str | None, session: str) -> bool:
        """End a session's pin. False if it has none."""
        pins = self._pins.get(namespace, {})
        pin = pins.pop(session, None)
        if pin is None:
            return False
        self._count -= 1
        if not pins:
            del self._pins[namespace]
        self._let_go(namespace, pin.blocks)
        return True

    def unpin_all(self, names: Callable[[str | None], bool]) -> int:
        """End the pins of all namespaces that `names` is true for. Returns how many."""
        gone = [(owner, s) for owner, pins in self._pins.items() if names(owner) for s in pins]
        return sum(self.unpin(*key) for key in gone)

    def unpin_others(self, weights: str | None) -> None:
        """End the pins of what other weights than these made: it holds room for nobody."""
        for owner, pins in list(self._pins.items()):
            for session in [name for name, pin in pins.items() if pin.weights != weights]:
                self.unpin(owner, session)

    def expire(self, now: float) -> list[tuple[str | None, str]]:
        """End the pins whose time is over: (namespace, session) of each."""
        ended = []
        while self._ends and self._ends[0][0] <= now:
            _, _, namespace, session = heappop(self._ends)
            pin = self._pins.get(namespace, {}).get(session)
            if pin is not None and pin.expires <= now:
                self.unpin(namespace, session)
                ended.append((namespace, session))
        return ended

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts follow from the pins and keep the bounds."""
        everything = [(owner, pin) for owner, pins in self._pins.items() for pin in pins.values()]
        assert self._sessions == Counter(b for _, pin in everything for b in pin.blocks)
        assert all(count > 0 for count in self._sessions.values())
        for owner, pins in self._pins.items():
            held = set().union(*(pin.blocks for pin in pins.values()))
            assert pins and self._held[owner] == len(held)
        assert self._held.total() == self.total_blocks <= self._max_total
        assert self._count == len(everything) <= self._max_sessions
        assert len(everything) <= len(self._ends) <= 2 * self._max_sessions + FEW_ENDS

    def _note_end(self, expires: float, namespace: str | None, session: str) -> None:
        """Costs O(log n): the heap is made anew when most of it says nothing any more."""
        heappush(self._ends, (expires, next(self._numbers), namespace, session))
        if len(self._ends) > 2 * self._count + FEW_ENDS:
            self._ends = [
                (pin.expires, next(self._numbers), owner, name)
                for owner, pins in self._pins.items()
                for name, pin in pins.items()
            ]
            heapify(self._ends)

    def _let_go(self, namespace: str | None, blocks: Iterable[bytes]) -> None:
        for block_id in sorted(blocks):
            self._sessions[block_id] -= 1
            if not self._sessions[block_id]:
                del self._sessions[block_id]
                self._held[namespace] -= 1
                self._announce(block_id)
        if not self._held[namespace]:
            del self._held[namespace]

    def _announce(self, block_id: bytes) -> None:
        for listener in self._listeners:
            listener(block_id)


class RetentionPriority:
    """Who wants a block to stay: the waiting queue, and behind all of it the pins.

    For the device and the disk, where a pin is honoured as long as there is room.
    """

    def __init__(self, window: NextUse, pins: SessionPins) -> None:
        self._window = window
        self._pins = pins

    def __len__(self) -> int:
        return len(self._window) + len(self._pins)

    def next_use(self, block_id: bytes) -> float | None:
        """Rank of the first waiting request that needs it; infinity for a pin; None for nobody."""
        use = self._window.next_use(block_id)
        return float("inf") if use is None and self._pins.is_pinned(block_id) else use

    def subscribe(self, listener: Callable[[Sequence[bytes]], None]) -> None:
        """Call `listener(block_ids)` after the `next_use` of these blocks has changed."""
        self._window.subscribe(listener)
        self._pins.subscribe(lambda block_id: listener((block_id,)))
