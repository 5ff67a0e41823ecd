"""Fetches that nobody waits for: a client says that it will come back, and what it left is brought
from below to host memory ahead of its request.

Such a path is looked at as that of a waiting request is (`sources.py`), by a number that no request
has, and once only: what finds no room, or comes too late, is fetched again for the request itself.
Belongs to the scheduler thread.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice

from sglang_hc.policy.eviction import Block
from sglang_hc.queue.requests import QueuedPrompt, Serial
from sglang_hc.queue.sources import Sources
from sglang_hc.tree.identity import Prefix

MOST_ASKED = 64
"""Paths of which it is not known yet what is below; more are not taken."""

LOOKS = 4
"""Of them, how many are looked at in one pass: a look costs the blocks of a path."""

MOST_LOOKS = 4096
"""How often one of them is looked at, should no answer come."""


class WishedFetches:
    """See the module. counters: `wished_fetches`, `wished_blocks`."""

    def __init__(
        self, sources: Sources, is_kept: Callable[[bytes], bool], counters: Counter[str]
    ) -> None:
        """is_kept: whether a block must not make room: somebody waits for it, or retains it."""
        self._sources = sources
        self._is_kept = is_kept
        self._counters = counters
        self._asked: dict[Serial, int] = {}
        self._serials = itertools.count(-1, -1)  # requests have 0 and more

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, path: Prefix) -> bool:
        """Bring a path to host memory. False where too many are asked for already."""
        if len(self._asked) >= MOST_ASKED:
            return False
        serial = next(self._serials)
        self._asked[serial] = 0
        self._sources.requests.arrived(serial, partial(QueuedPrompt, path, lambda: 0))
        return True

    def go_on(self) -> None:
        """Begin what can begin. Called in every pass: they take turns."""
        for serial in tuple(islice(self._asked, LOOKS)):
            looks = self._asked[serial] + 1
            if self._begin(serial) or looks == MOST_LOOKS:
                self._leave(serial)
            else:
                del self._asked[serial]
                self._asked[serial] = looks

    def give_up_all(self) -> None:
        """Nothing of what is below may be read any more."""
        for serial in tuple(self._asked):
            self._leave(serial)

    def _leave(self, serial: Serial) -> None:
        del self._asked[serial]
        self._sources.requests.left(serial)

    def _begin(self, serial: Serial) -> bool:
        """False where it is not known yet what is below."""
        missing = self._sources.missing(serial)
        if missing is None:
            return False
        ids, coming = missing.path.block_ids, self._sources.coming
        first, end = missing.first, missing.first + missing.count
        while first < end and ids[first] in coming:
            first += 1
        end = next((i for i in range(first, end) if ids[i] in coming), end)

        def is_protected(block: Block) -> bool:
            return self._is_kept(block.block_id)

        if first < end:
            count = end - first
            started = self._sources.start(serial, missing, first, count, is_protected)
            self._counters["wished_fetches"] += started > 0
            self._counters["wished_blocks"] += started
        if missing.end is not None and missing.end.begin is not None:
            missing.end.begin(is_protected)
        return True
