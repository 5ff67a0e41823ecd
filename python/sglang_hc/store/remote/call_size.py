"""How many blocks one call should read from a remote store.

The blocks of a call come together at its end. A prompt whose front is computed meanwhile
(`policy.meeting`) is better off the sooner some of them come, so a call brings few. It has a price
of its own, though, such as a round trip: it brings enough for that to be a small part of it.
"""

from __future__ import annotations

import math
import threading
from collections import deque

from sglang_hc.policy.fit import fit_line

SHORT_S = 0.02
"""A call may always read for so long: one that is as short as a pass of the model keeps nobody
waiting."""

OWN_SHARE = 0.1
"""Part of a longer call that what it costs by itself may take."""

CALLS_SEEN = 16
"""Calls whose times count; where they all had one size, the next has another."""


class CallSize:
    """A number of blocks that follows the times of the last calls. Any thread may use it."""

    def __init__(self, most: int) -> None:
        """most: blocks that a call can read."""
        self._most = most
        self._seen: deque[tuple[int, float]] = deque(maxlen=CALLS_SEEN)
        self._lock = threading.Lock()
        self.blocks = 1
        """That the next call should read at most."""

    def observe(self, blocks: int, seconds: float) -> None:
        """A call read so many blocks in so long. A time that is not positive says nothing."""
        if seconds > 0:
            with self._lock:
                self._seen.append((blocks, seconds))
                self.blocks = min(self._most, max(1, self._wanted()))

    def _wanted(self) -> int:
        sizes = {blocks for blocks, _ in self._seen}
        if len(sizes) > 1:
            line = fit_line(self._seen)
            each = line.per_token  # these samples count blocks
            # What lies far beyond the calls that were timed is not believed.
            return min(2 * max(sizes), _blocks(line.fixed, each, self._most))
        # Calls of one size do not tell what each costs by itself: another size will.
        (size,) = sizes
        if 2 * size <= self._most:
            return 2 * size
        each = math.fsum(seconds for _, seconds in self._seen) / (size * len(self._seen))
        return max(size // 2, _blocks(0.0, each, self._most))


def _blocks(fixed: float, each: float, most: int) -> int:
    """Blocks of a call that takes `fixed` seconds and `each` for every block; at most `most`."""
    seconds = max(SHORT_S - fixed, fixed * (1 / OWN_SHARE - 1))  # for the blocks alone
    return most if seconds >= most * each else int(seconds / each)
