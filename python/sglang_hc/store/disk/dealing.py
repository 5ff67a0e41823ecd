"""Which directory gets the next block: each in its turn, in proportion to the budgets.

Directories of equal budgets get blocks round robin, so that the blocks of one prefix are read from
all of them at once (HCache section 4.2). With unequal budgets a larger directory has more turns,
spread evenly, so that all fill at the same time and evict blocks of the same age.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from sglang_hc.store.disk.directory import Directory


class Dealer:
    """Deals blocks out over directories. Thread-safe.

    In any run of turns during which the same directories are usable, a directory's turns differ
    from its proportional part by less than the number of directories.
    """

    def __init__(self, directories: Sequence[Directory], slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._weights = {d: max(1, d.slabs.data_bytes // slot_bytes) for d in directories}
        self._credits = dict.fromkeys(directories, 0)

    def order(self) -> list[Directory]:
        """The usable directories, in the order in which they should be asked for a slot.

        The one whose turn it is comes first, unless it would have to evict while another directory
        has free slots; then those with the most free slots come first.
        """
        usable = [directory for directory in self._weights if directory.usable()]
        if len(usable) < 2:
            return usable
        first = self._next(usable)
        others = [directory for directory in usable if directory is not first]
        if first.free_slots(self._slot_bytes):
            return [first, *others]
        free = {directory: directory.free_slots(self._slot_bytes) for directory in others}
        others.sort(key=free.__getitem__, reverse=True)
        return [*others, first] if free[others[0]] else [first, *others]

    def _next(self, usable: Sequence[Directory]) -> Directory:
        """Smooth weighted round robin: everybody earns its weight, and whoever has most pays."""
        with self._lock:
            for directory in usable:
                self._credits[directory] += self._weights[directory]
            chosen = max(usable, key=self._credits.__getitem__)
            self._credits[chosen] -= sum(self._weights[directory] for directory in usable)
            return chosen
