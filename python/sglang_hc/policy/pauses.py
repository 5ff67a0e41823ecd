"""How long sessions stay away, learned while they do, and what keeping one is worth meanwhile.

A session that has been answered comes back after its tool has run or its user has read, or never.
How long that takes hangs on the tool, so pauses are counted by namespace, by tool and by turn
(`PauseTable`), and a kind with few pauses so far is judged by the wider one. Sessions that are
still away count too, as long as they have been: otherwise those that never come back would be
missed.

What a session is worth (`Away.value`) is the best rate at which the memory it holds can pay: over
all spans from now on, the chance that it comes back within the span, over the time for which it
would be kept, which ends when it comes back. This is Gittins' index. It is least for a session
whose tool is always back by now, and it grows for one whose tool is about to be.

Pure: times come from the caller, and must not go backwards. Clients choose namespaces and names
of tools, so the tables are bounded, and no namespace is judged by the pauses of another.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

FIRST_S = 0.01
"""Pauses below this are alike."""

BUCKETS = 42
"""Two to a doubling, from FIRST_S to about three hours."""

STARTS = (0.0, *(FIRST_S * 2 ** (step / 2) for step in range(BUCKETS - 1)))
"""Seconds at which each bucket begins."""

WIDTHS = tuple(
    (STARTS[at + 1] if at + 1 < BUCKETS else 2 * STARTS[at]) - STARTS[at] for at in range(BUCKETS)
)

PRIOR = 0.29
"""Chance to come back within any bucket before anything is known: a pause that has lasted so long
lasts twice as long in half of the cases. The value then falls with the age: the oldest leave."""

STRENGTH = 16.0
"""Pauses of a kind for which the wider kind stands."""

MEMORY = 1024.0
"""Weight of the pauses of a kind. Beyond it all of them weigh half from then on."""

EVIDENCE = 64
"""Sessions that must have come back before values count."""

REFRESH = 64
"""Changes of a namespace's counts after which its values are computed anew."""

MAX_SESSIONS = 16384
"""Sessions that are followed at most. Then the one that left first counts as gone for good."""

MAX_NAMESPACES = 64
MAX_TOOLS = 32
"""Of a namespace."""

MAX_NAME = 64
"""Characters of a tool's name that count."""


def bucket_of(seconds: float) -> int:
    """Of a pause that has lasted so long."""
    return bisect_right(STARTS, seconds) - 1


class Kind(NamedTuple):
    """Of a pause. tool: that the last answer called; empty for none. turn: answers so far."""

    namespace: str | None
    tool: str
    turn: int


class Survival:
    """Pauses of one kind by bucket: those that ended in it, and those that have lasted until it and
    go on, or were lost sight of there."""

    def __init__(self) -> None:
        self.ended = array("d", bytes(8 * BUCKETS))
        self.open = array("d", bytes(8 * BUCKETS))
        self.total = 0.0
        self.halvings = 0
        self.changes = 0

    def began(self) -> int:
        """One begins. Returns what `ended_in` and `lasted` ask for."""
        if self.total >= MEMORY:
            self.halvings += 1
            self.total /= 2
            for counts in (self.ended, self.open):
                for bucket, weight in enumerate(counts):
                    counts[bucket] = weight / 2
        self.open[0] += 1.0
        self.total += 1.0
        self.changes += 1
        return self.halvings

    def lasted(self, since: int, bucket: int) -> None:
        """One that began at `since` has come from the bucket before into this one."""
        self.changes += 1
        weight = 0.5 ** (self.halvings - since)
        self.open[bucket - 1] = max(0.0, self.open[bucket - 1] - weight)
        self.open[bucket] += weight

    def ended_in(self, since: int, bucket: int) -> None:
        self.changes += 1
        weight = 0.5 ** (self.halvings - since)
        self.open[bucket] = max(0.0, self.open[bucket] - weight)
        self.ended[bucket] += weight

    def chances(self, prior: Sequence[float]) -> list[float]:
        """By bucket: how likely a pause that reaches it ends in it. prior: the same of the wider
        kind."""
        beyond, found = 0.0, [0.0] * BUCKETS
        for bucket in range(BUCKETS - 1, -1, -1):
            ended, open_ = self.ended[bucket], self.open[bucket]
            reached = beyond + ended + open_ / 2
            found[bucket] = (ended + STRENGTH * prior[bucket]) / (reached + STRENGTH)
            beyond += ended + open_
        return found


def values_of(chances: Sequence[float]) -> tuple[float, ...]:
    """By bucket, per second: Gittins' index of a pause that has reached it. chances: as from
    `Survival.chances`."""
    spans: list[tuple[float, float, float]] = []
    """Of what follows, by the rate at which it pays, the best first at the end: (chance to come
    back within the span, seconds for which the session is kept in it, chance to outlast it)."""
    found = [0.0] * BUCKETS
    for bucket in range(BUCKETS - 1, -1, -1):
        chance = chances[bucket]
        seconds, lasts = WIDTHS[bucket] * (1 - chance / 2), 1 - chance
        while spans and spans[-1][0] * seconds > chance * spans[-1][1]:
            then, longer, still = spans.pop()
            chance, seconds, lasts = chance + lasts * then, seconds + lasts * longer, lasts * still
        spans.append((chance, seconds, lasts))
        found[bucket] = chance / seconds
    return tuple(found)


UNKNOWN = (0.6, *(PRIOR,) * (BUCKETS - 1))
UNKNOWN_VALUES = values_of(UNKNOWN)


@dataclass(eq=False, slots=True)
class _Values:
    """values: by bucket. changes: of the namespace's counts when they were computed."""

    values: tuple[float, ...]
    changes: int


@dataclass(eq=False, slots=True)
class _Tool:
    all: Survival = field(default_factory=Survival)
    turns: dict[int, Survival] = field(default_factory=dict)
    values: dict[int, _Values] = field(default_factory=dict)
    used: int = 0


@dataclass(eq=False, slots=True)
class _Namespace:
    all: Survival = field(default_factory=Survival)
    tools: dict[str, _Tool] = field(default_factory=dict)


class PauseTable:
    """Pauses by kind. Turns count by their octave.

    A new namespace takes the place of the one with the fewest pauses, a new tool that of the one
    in its namespace which was called longest ago.
    """

    def __init__(self) -> None:
        self._namespaces: dict[str | None, _Namespace] = {}
        self._clock = 0

    def __len__(self) -> int:
        """Kinds that have counts of their own."""
        return sum(
            1 + sum(1 + len(tool.turns) for tool in space.tools.values())
            for space in self._namespaces.values()
        )

    def levels(self, kind: Kind) -> tuple[Survival, ...]:
        """The counts of a kind, the widest first; made if they are new."""
        space, tool = self._find(kind)
        turn = kind.turn.bit_length()
        found = tool.turns.get(turn)
        if found is None:
            found = tool.turns[turn] = Survival()
        return space.all, tool.all, found

    def values(self, kind: Kind) -> tuple[float, ...]:
        """What a pause of this kind is worth, by bucket."""
        space, tool = self._find(kind)
        turn, changes = kind.turn.bit_length(), space.all.changes
        known = tool.values.get(turn)
        if known is None or changes - known.changes >= REFRESH:
            chances: Sequence[float] = UNKNOWN
            for level in self.levels(kind):
                chances = level.chances(chances)
            known = tool.values[turn] = _Values(values_of(chances), changes)
        return known.values

    def forget(self, names: Callable[[str | None], bool]) -> None:
        """Drop the namespaces that `names` is true for."""
        for name in list(filter(names, self._namespaces)):
            del self._namespaces[name]

    def _find(self, kind: Kind) -> tuple[_Namespace, _Tool]:
        self._clock += 1
        spaces = self._namespaces
        space = spaces.get(kind.namespace)
        if space is None:
            if len(spaces) >= MAX_NAMESPACES:
                del spaces[min(spaces, key=lambda name: spaces[name].all.total)]
            space = spaces[kind.namespace] = _Namespace()
        name = kind.tool[:MAX_NAME]
        tool = space.tools.get(name)
        if tool is None:
            if len(space.tools) >= MAX_TOOLS:
                del space.tools[min(space.tools, key=lambda name: space.tools[name].used)]
            tool = space.tools[name] = _Tool()
        tool.used = self._clock
        return space, tool


@dataclass(eq=False, slots=True)
class Away:
    """A session between two requests, and while the next one is served.

    kind: of its pause; None while it is served. ends: identities of blocks by one of which its next
    prompt is known. since: when it left, or came. turns: answers so far. value: what its blocks are
    worth, per second; see the module. is_over: nothing is said of it any more.
    """

    kind: Kind | None
    ends: tuple[bytes, ...]
    since: float
    turns: int = 0
    bucket: int = 0
    value: float = 0.0
    is_over: bool = False
    counted: tuple[tuple[Survival, int], ...] = ()


class Pauses:
    """The sessions of one server that are away. O(log n) for each call and each change of a value.

    Belongs to the scheduler thread.
    """

    def __init__(self) -> None:
        self.table = PauseTable()
        self.returned = 0
        """Sessions that came back."""
        self._by_end: dict[bytes, Away] = {}
        self._all: dict[Away, None] = {}
        """In the order in which they left."""
        self._next: list[tuple[float, int, Away]] = []
        """A heap of when values change."""
        self._numbers = itertools.count()
        self._listeners: list[Callable[[Iterable[Away]], None]] = []

    @property
    def sessions(self) -> Collection[Away]:
        """Those that are followed, away or served."""
        return self._all.keys()

    @property
    def is_evident(self) -> bool:
        """Whether enough is known for values to count."""
        return self.returned >= EVIDENCE

    def subscribe(self, listener: Callable[[Iterable[Away]], None]) -> None:
        """Call `listener(sessions)` after their values have changed."""
        self._listeners.append(listener)

    def left(
        self, kind: Kind, ends: Sequence[bytes], now: float, before: Away | None = None
    ) -> Away:
        """A session was answered. ends: see `Away`. before: what `came` said of the request."""
        if before is not None:
            self._drop(before)
        session = Away(kind, tuple(ends), now, kind.turn)
        session.counted = tuple((level, level.began()) for level in self.table.levels(kind))
        session.value = self.table.values(kind)[0]
        for end in session.ends:
            self._by_end[end] = session
        self._follow(session)
        return session

    def came(self, path: Sequence[bytes], now: float) -> Away:
        """A request came whose prompt has these blocks, root first. The session that goes on with
        it, the longest one, or a new one; its value falls with its age until it is answered."""
        by_end = self._by_end
        session = next((by_end[block] for block in reversed(path) if block in by_end), None)
        if session is None:
            session = Away(None, (), now, value=UNKNOWN_VALUES[0])
            self._follow(session)
            return session
        bucket = bucket_of(now - session.since)
        while session.bucket < bucket:
            self._lasted(session)
        for level, since in session.counted:
            level.ended_in(since, bucket)
        self.returned += 1
        self._forget(session)
        session.kind, session.counted = None, ()
        session.since, session.bucket, session.value = now, 0, UNKNOWN_VALUES[0]
        self._note(session)
        self._tell([session])
        return session

    def advance(self, now: float) -> None:
        """So much time has passed."""
        changed: dict[Away, None] = {}
        while self._next and self._next[0][0] <= now:
            _, _, session = heappop(self._next)
            due = not session.is_over and session.bucket + 1 < BUCKETS
            if not due or STARTS[session.bucket + 1] > now - session.since:
                continue  # it came back meanwhile, and has another item
            self._lasted(session)
            values = UNKNOWN_VALUES if session.kind is None else self.table.values(session.kind)
            session.value = values[session.bucket]
            self._note(session)
            changed[session] = None
        if changed:
            self._tell(changed)

    def forget(self, names: Callable[[str | None], bool]) -> None:
        """Nothing is known any more of the namespaces that `names` is true for."""
        self.table.forget(names)
        for session in list(self._all):
            if session.kind is not None and names(session.kind.namespace):
                self._drop(session)

    def lose_sight(self) -> None:
        """Of all who are away: they come back under names that nobody knows. How long they have
        been away counts, and nothing that follows."""
        for session in list(self._all):
            if session.kind is not None:
                self._drop(session)

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the sessions that are away are known by their
        ends."""
        assert len(self._all) <= MAX_SESSIONS
        assert all(not session.is_over for session in self._all)
        assert all(session in self._all for session in self._by_end.values())
        assert all(session.kind is not None for session in self._by_end.values())

    def _lasted(self, session: Away) -> None:
        session.bucket += 1
        for level, since in session.counted:
            level.lasted(since, session.bucket)

    def _follow(self, session: Away) -> None:
        while len(self._all) >= MAX_SESSIONS:
            self._drop(next(iter(self._all)))
        self._all[session] = None
        self._note(session)

    def _note(self, session: Away) -> None:
        """When its value changes next. In the last bucket it stays as it is."""
        if session.bucket + 1 < BUCKETS:
            due = session.since + STARTS[session.bucket + 1]
            heappush(self._next, (due, next(self._numbers), session))

    def _drop(self, session: Away) -> None:
        self._forget(session)
        self._all.pop(session, None)
        session.is_over, session.value = True, 0.0

    def _forget(self, session: Away) -> None:
        """No prompt goes on with it any more."""
        for end in session.ends:
            if self._by_end.get(end) is session:
                del self._by_end[end]

    def _tell(self, changed: Iterable[Away]) -> None:
        for listener in self._listeners:
            listener(changed)
