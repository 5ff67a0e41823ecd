"""Blocks that other servers stored in a shared directory: asked for by name, off the scheduler
thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from sglang_hc.store.disk.store import DiskStore
from sglang_hc.store.workers import Workers

ABSENT_S = 2.0
"""How long a block counts as absent that was not found: others go on storing."""

ANSWER_S = 2.0
"""Longest that a request waits for an answer; a few milliseconds as a rule. While one takes longer,
nothing else is asked, and nobody waits."""

MOST_ABSENT = 1 << 14


class Finder:
    """Asks for what is not known. Methods belong to the scheduler thread."""

    def __init__(
        self,
        store: DiskStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._store = store
        self._asked: dict[bytes, float] = {}
        """When questions become too old, by the first block of each, the oldest first."""
        self._absent: dict[bytes, float] = {}
        """Until when blocks count as absent, the oldest first."""
        self._ended: deque[tuple[bytes, bytes | None]] = deque()
        """The first block of a question, and the one that was not found."""
        self._thread: Workers[Sequence[bytes]] = Workers("hc-find", self._find)

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        """See `BlockIo.ask`. block_ids: the first is not known to be here."""
        now = self._clock()
        while self._ended:
            first, missing = self._ended.popleft()
            self._asked.pop(first, None)
            if missing is not None:
                self._absent.pop(missing, None)
                self._absent[missing] = now + ABSENT_S
                if len(self._absent) > MOST_ABSENT:
                    del self._absent[next(iter(self._absent))]
        first = block_ids[0]
        if self._absent.get(first, 0.0) > now:
            return False
        if next(iter(self._asked.values()), now + 1) <= now:
            return False
        if first not in self._asked:
            self._asked[first] = now + ANSWER_S
            self._thread.submit(block_ids)
        return True

    def close(self, timeout: float) -> None:
        """End; a question that hangs is left behind."""
        self._thread.withdraw()
        self._thread.close(timeout)

    def _find(self, asked: list[Sequence[bytes]]) -> None:
        for block_ids in asked:
            missing: bytes | None = block_ids[0]
            try:
                missing = next((one for one in block_ids if not self._found(one)), None)
            finally:
                self._ended.append((block_ids[0], missing))

    def _found(self, block_id: bytes) -> bool:
        return self._store.contains((block_id,)) > 0 or self._store.find(block_id)
