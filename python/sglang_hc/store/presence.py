"""What a remote store was found to hold: an answer for the scheduler thread without asking."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Sequence

MOST_REMEMBERED = 1 << 18


class Presence(enum.Enum):
    """What was found out about a block. The value is for how many seconds it is believed."""

    PRESENT = 60.0
    """May be stale: somebody else decides what leaves the store. A wrong yes costs one read."""
    ABSENT = 2.0
    """Asked again soon: another server may have stored the block meanwhile."""
    USELESS = 600.0
    """It is there and cannot be served. Stores keep the first bytes of a key, so that saving the
    block again would not heal it."""


_NOTHING = (None, 0.0)


class PresenceCache:
    """Identities seen or missed lately, each for a while; the oldest are forgotten first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: OrderedDict[bytes, tuple[Presence, float]] = OrderedDict()

    def state(self, identity: bytes) -> Presence | None:
        """None: not known, or no longer."""
        found = self._found.get(identity)
        return None if found is None or self._clock() >= found[1] else found[0]

    def leading(self, identities: Sequence[bytes]) -> int:
        """How many of the first identities are known to be there."""
        now = self._clock()
        for index, identity in enumerate(identities):
            presence, until = self._found.get(identity, _NOTHING)
            if presence is not Presence.PRESENT or now >= until:
                return index
        return len(identities)

    def note(self, identity: bytes, presence: Presence) -> None:
        """Remember an answer in place of an earlier one; a useless block stays useless."""
        if self.state(identity) is Presence.USELESS:
            return
        self._found.pop(identity, None)
        self._found[identity] = presence, self._clock() + presence.value
        if len(self._found) > MOST_REMEMBERED:
            self._found.popitem(last=False)

    def clear(self) -> None:
        self._found.clear()
