"""Retention beside the eviction order: a time to live per block, and pins with expiry per session.

A pin keeps a session's blocks from being evicted while, say, a tool call runs. It always expires,
and a namespace can pin only so many blocks, so that one tenant cannot take a tier from the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, NamedTuple, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
"""Whatever stands for a block in its tier."""


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


@dataclass
class _Pin:
    namespace: str | None
    blocks: set[bytes]
    expires: float


class SessionPins:
    """Which sessions hold which blocks, until when.

    Pinning a session again replaces its blocks and its expiry. Blocks shared by several sessions of
    one namespace count once against the bounds.
    """

    def __init__(self, max_blocks: int, max_total: int, max_seconds: float) -> None:
        """max_blocks, max_total: bounds per namespace and of all. max_seconds: longest expiry that
        may be asked for."""
        if not 0 <= max_blocks <= max_total or max_seconds <= 0:
            raise ValueError("pins need 0 <= max_blocks <= max_total and max_seconds > 0")
        self._max_blocks = max_blocks
        self._max_total = max_total
        self._max_seconds = max_seconds
        self._pins: dict[tuple[str | None, str], _Pin] = {}
        self._holders: dict[tuple[str | None, bytes], int] = {}
        self._held: dict[bytes, int] = {}
        self._per_namespace: dict[str | None, int] = {}
        self._expiries: list[tuple[float, int, tuple[str | None, str]]] = []
        self._ticket = 0
        self._listeners: list[Callable[[bytes], None]] = []

    def __len__(self) -> int:
        """Sessions that pin blocks."""
        return len(self._pins)

    @property
    def max_blocks(self) -> int:
        """Bound per namespace."""
        return self._max_blocks

    @property
    def total_blocks(self) -> int:
        """Blocks held by anybody."""
        return len(self._held)

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
        return block_id in self._held

    def pinned_blocks(self, namespace: str | None) -> int:
        """Blocks that count against the namespace's bound."""
        return self._per_namespace.get(namespace, 0)

    def pin(
        self,
        namespace: str | None,
        session: str,
        blocks: Iterable[bytes],
        seconds: float,
        now: float,
    ) -> None:
        """Hold `blocks` for the session until now + seconds.

        Raises PinLimitError, and changes nothing, when the namespace's bound or the longest expiry
        would be passed.
        """
        if not 0 < seconds <= self._max_seconds:
            raise PinLimitError(
                f"pin of {seconds:g} s: give more than 0 and at most {self._max_seconds:g} s"
            )
        self.expire(now)
        wanted = set(blocks)
        key = (namespace, session)
        old = self._pins.get(key)
        own = old.blocks if old is not None else set()
        added = sum((namespace, b) not in self._holders for b in wanted - own)
        freed = sum(self._holders[namespace, b] == 1 for b in own - wanted)
        count = self.pinned_blocks(namespace) + added - freed
        if count > self._max_blocks:
            raise PinLimitError(
                f"pin of session {session!r} needs {count} blocks in its namespace, the bound is "
                f"{self._max_blocks}: unpin another session or wait for one to expire"
            )
        if added > freed and self.total_blocks + added - freed > self._max_total:
            raise PinLimitError(
                f"pin of session {session!r} needs {added} more blocks, and {self.total_blocks} of "
                f"the {self._max_total} that may be pinned are: wait for other pins to expire"
            )
        pin = _Pin(namespace, wanted, now + seconds)
        self._pins[key] = pin
        for block_id in wanted - own:
            self._hold(namespace, block_id)
        for block_id in own - wanted:
            self._let_go(namespace, block_id)
        self._ticket += 1
        heappush(self._expiries, (pin.expires, self._ticket, key))

    def unpin(self, namespace: str | None, session: str) -> bool:
        """End a session's pin. False if it has none."""
        pin = self._pins.pop((namespace, session), None)
        if pin is None:
            return False
        for block_id in pin.blocks:
            self._let_go(namespace, block_id)
        return True

    def expire(self, now: float) -> list[tuple[str | None, str]]:
        """End the pins whose time is over: (namespace, session) of each."""
        ended: list[tuple[str | None, str]] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, _, key = heappop(self._expiries)
            pin = self._pins.get(key)
            if pin is not None and pin.expires <= now:  # else it was renewed since
                self.unpin(*key)
                ended.append(key)
        return ended

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts follow from the pins and keep the bound."""
        holders: dict[tuple[str | None, bytes], int] = {}
        for pin in self._pins.values():
            for block_id in pin.blocks:
                key = (pin.namespace, block_id)
                holders[key] = holders.get(key, 0) + 1
        assert holders == self._holders
        for namespace, count in self._per_namespace.items():
            assert count == sum(key[0] == namespace for key in holders) <= self._max_blocks
        assert set(self._held) == {block_id for _, block_id in holders}
        assert len(self._held) <= self._max_total

    def _hold(self, namespace: str | None, block_id: bytes) -> None:
        key = (namespace, block_id)
        count = self._holders.get(key, 0)
        self._holders[key] = count + 1
        if count == 0:
            self._per_namespace[namespace] = self._per_namespace.get(namespace, 0) + 1
            self._held[block_id] = self._held.get(block_id, 0) + 1
            if self._held[block_id] == 1:
                self._announce(block_id)

    def _let_go(self, namespace: str | None, block_id: bytes) -> None:
        key = (namespace, block_id)
        self._holders[key] -= 1
        if self._holders[key]:
            return
        del self._holders[key]
        self._per_namespace[namespace] -= 1
        if not self._per_namespace[namespace]:
            del self._per_namespace[namespace]
        self._held[block_id] -= 1
        if not self._held[block_id]:
            del self._held[block_id]
            self._announce(block_id)

    def _announce(self, block_id: bytes) -> None:
        for listener in self._listeners:
            listener(block_id)


class NextUse(Protocol):
    """What `RetentionPriority` asks of the look-ahead window."""

    def __len__(self) -> int: ...
    def next_use(self, block_id: bytes) -> float | None: ...
    def next_uses(self, blocks: Iterable[bytes]) -> dict[bytes, float | None]: ...
    def subscribe(self, listener: Callable[[bytes], None]) -> None: ...


class RetentionPriority:
    """Who wants a block to stay: the waiting queue, and behind all of it the pins.

    For tiers where a pin is a wish and not a promise: the device and the disk.
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

    def subscribe(self, listener: Callable[[bytes], None]) -> None:
        """Call `listener(block_id)` after each change of a block's `next_use`."""
        self._window.subscribe(listener)
        self._pins.subscribe(listener)
