"""Retention beside the eviction order: a time to live per block, and pins with expiry per session.

A pin keeps a session's blocks from being evicted while, say, a tool call runs. It always expires,
and a namespace can pin only so many blocks, so that one tenant cannot take a tier from the others.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from sglang_hc.policy.eviction import NextUse

K = TypeVar("K", bound=Hashable)
"""Whatever stands for a block in its tier."""


PINNED_SHARE = 0.5
"""Share of the host tier that pins may hold together: the other half always turns over."""

NAMESPACE_SHARE = 0.25
"""Share of the host tier that the pins of one namespace may hold."""

MAX_PIN_S = 3600.0
"""Longest pin, in seconds."""


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


class SessionPins:
    """Which sessions pin which blocks, until when.

    Pinning a session again replaces its blocks and its expiry. A block's identity depends on its
    namespace, so sessions of one namespace only can share it; it then counts once.
    """

    def __init__(self, max_blocks: int, max_total: int, max_seconds: float) -> None:
        """max_blocks, max_total: bounds per namespace and of all. max_seconds: longest expiry that
        may be asked for."""
        if not 0 <= max_blocks <= max_total or max_seconds <= 0:
            raise ValueError("pins need 0 <= max_blocks <= max_total and max_seconds > 0")
        self.max_blocks = max_blocks
        self._max_total = max_total
        self._max_seconds = max_seconds
        self._pins: dict[tuple[str | None, str], _Pin] = {}
        self._sessions: Counter[bytes] = Counter()
        """How many sessions pin a block; only blocks that some session pins."""
        self._first_end = math.inf
        """No pin ends before this."""
        self._listeners: list[Callable[[bytes], None]] = []

    @classmethod
    def sized_for(cls, slots: int) -> SessionPins:
        """With the bounds for a host tier of so many blocks."""
        return cls(int(NAMESPACE_SHARE * slots), int(PINNED_SHARE * slots), MAX_PIN_S)

    def __len__(self) -> int:
        """Sessions that pin blocks."""
        return len(self._pins)

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
            for (owner, session), pin in self._pins.items()
            if owner == namespace
        ]
        return sorted(pins, key=lambda pin: pin.seconds)

    def is_pinned(self, block_id: bytes) -> bool:
        """Whether any session pins this block. Call `expire` first when time has passed."""
        return block_id in self._sessions

    def pinned_blocks(self, namespace: str | None, without: str | None = None) -> set[bytes]:
        """Blocks that the sessions of a namespace pin, one session left out if it is named."""
        pins = self._pins.items()
        return set().union(
            *(p.blocks for (owner, name), p in pins if owner == namespace and name != without)
        )

    def pin(
        self,
        namespace: str | None,
        session: str,
        blocks: Iterable[bytes],
        seconds: float,
        now: float,
    ) -> None:
        """Pin `blocks` for the session until now + seconds. O(blocks pinned in the namespace).

        Raises PinLimitError, and changes nothing, when the namespace's bound, the bound of all or
        the longest expiry would be passed.
        """
        if not 0 < seconds <= self._max_seconds:
            raise PinLimitError(
                f"pin of {seconds:g} s: give more than 0 and at most {self._max_seconds:g} s"
            )
        self.expire(now)
        wanted = set(blocks)
        count = len(self.pinned_blocks(namespace, without=session) | wanted)
        if count > self.max_blocks:
            raise PinLimitError(
                f"pin of session {session!r} needs {count} blocks in its namespace, the bound is "
                f"{self.max_blocks}: unpin another session or wait for one to expire"
            )
        old = self._pins.get((namespace, session))
        own = old.blocks if old is not None else set()
        added = sum(block_id not in self._sessions for block_id in wanted)
        freed = sum(self._sessions[block_id] == 1 for block_id in own - wanted)
        if added > freed and self.total_blocks + added - freed > self._max_total:
            raise PinLimitError(
                f"pin of session {session!r} needs {added} more blocks, and {self.total_blocks} of "
                f"the {self._max_total} that may be pinned are: wait for other pins to expire"
            )
        self._pins[namespace, session] = _Pin(wanted, now + seconds)
        self._first_end = min(self._first_end, now + seconds)
        for block_id in sorted(wanted - own):  # in the same order in every process
            self._sessions[block_id] += 1
            if self._sessions[block_id] == 1:
                self._announce(block_id)
        self._let_go(own - wanted)

    def unpin(self, namespace: str | None, session: str) -> bool:
        """End a session's pin. False if it has none."""
        pin = self._pins.pop((namespace, session), None)
        if pin is not None:
            self._let_go(pin.blocks)
        return pin is not None

    def expire(self, now: float) -> list[tuple[str | None, str]]:
        """End the pins whose time is over: (namespace, session) of each."""
        if now < self._first_end:
            return []
        ended = [key for key, pin in self._pins.items() if pin.expires <= now]
        for key in ended:
            self.unpin(*key)
        self._first_end = min((pin.expires for pin in self._pins.values()), default=math.inf)
        return ended

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts follow from the pins and keep the bounds."""
        assert self._sessions == Counter(b for pin in self._pins.values() for b in pin.blocks)
        assert all(count > 0 for count in self._sessions.values())
        for namespace in {owner for owner, _ in self._pins}:
            assert len(self.pinned_blocks(namespace)) <= self.max_blocks
        assert self.total_blocks <= self._max_total

    def _let_go(self, blocks: Iterable[bytes]) -> None:
        for block_id in sorted(blocks):
            self._sessions[block_id] -= 1
            if not self._sessions[block_id]:
                del self._sessions[block_id]
                self._announce(block_id)

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

    def next_uses(self, blocks: Iterable[bytes]) -> dict[bytes, float | None]:
        """`next_use` of many blocks."""
        if not len(self._pins):
            return self._window.next_uses(blocks)
        return {block_id: self.next_use(block_id) for block_id in blocks}

    def subscribe(self, listener: Callable[[Sequence[bytes]], None]) -> None:
        """Call `listener(block_ids)` after the `next_use` of these blocks has changed."""
        self._window.subscribe(listener)
        self._pins.subscribe(lambda block_id: listener((block_id,)))
