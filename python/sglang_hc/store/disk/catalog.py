"""Which blocks of one model lie in which directory: the state that reads, writes, eviction and
scrubbing share.

A block lies whole in one directory. A directory that failed, or whose I/O keeps failing, is out of
use: its blocks are not found, and the other directories go on. Lookups go to dictionaries in
memory; leases keep the slot of a block that is being used from being reused under it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from sglang_hc.store.disk.counters import Counters
from sglang_hc.store.disk.directory import Directory, DirectoryFailed
from sglang_hc.store.disk.format import SlotFormat
from sglang_hc.store.disk.index import ROWS_PER_COMMIT
from sglang_hc.store.disk.schema import IndexFull, Place

logger = logging.getLogger(__name__)

_ACCESS_QUANTUM_S = 10
_TOUCHES_KEPT = 1 << 16


class Location(NamedTuple):
    """A leased slot of one directory."""

    directory: Directory
    place: Place


class Catalog:
    """All blocks of one model over its directories. Thread-safe."""

    def __init__(
        self,
        directories: Sequence[Directory],
        slot_format: SlotFormat,
        fingerprint: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directories = tuple(directories)
        self.slot_format = slot_format
        self.fingerprint = fingerprint
        self.clock = clock
        self.counters = Counters()
        self.removed: deque[bytes] = deque()
        self._touches: deque[tuple[int, int, Sequence[bytes]]] = deque(maxlen=_TOUCHES_KEPT)
        self._in_use_before = set(self.directories)

    # -- directories --------------------------------------------------------------------------

    def in_use(self) -> list[Directory]:
        """The directories that may be asked now."""
        return [directory for directory in self.directories if directory.usable()]

    def io_failed(self, directory: Directory) -> None:
        """A read or write of a slot failed. After several in a row the directory gets a pause."""
        if directory.breaker.failed():
            self.counters.add("directory_pauses")
            logger.error(
                "%s keeps failing; it is not used for a while, and its blocks are not found",
                directory.root,
            )

    def io_succeeded(self, directory: Directory) -> None:
        """A read or write of a slot came back well."""
        if directory.breaker.succeeded():
            logger.warning("%s answers again; it is used again", directory.root)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(identities in directories that are in use again, identities in those that went out of
        use), each since the last call. For one caller, who mirrors what can be read."""
        now = set(self.in_use())
        before, self._in_use_before = self._in_use_before, now
        back = [name for directory in now - before for name in directory.places.copy()]
        lost = [name for directory in before - now for name in directory.places.copy()]
        return back, lost

    # -- lookup -------------------------------------------------------------------------------

    def leading(self, block_ids: Sequence[bytes]) -> int:
        """How many of the first identities are present, without a gap."""
        known = [directory.places for directory in self.in_use()]
        if len(known) == 1:
            return _run(known[0], block_ids)
        for count, block_id in enumerate(block_ids):
            for places in known:
                if block_id in places:
                    break
            else:
                return count
        return len(block_ids)

    def __contains__(self, block_id: bytes) -> bool:
        return self.leading((block_id,)) == 1

    def __len__(self) -> int:
        return sum(len(directory.places) for directory in self.in_use())

    def ids(self) -> list[bytes]:
        """Identities of all blocks present. One that lies in two directories is named twice."""
        return [name for directory in self.in_use() for name in directory.places.copy()]

    def is_out_of_use(self, block_id: bytes) -> bool:
        """Whether a directory has this block that may not be asked now."""
        return any(block_id in d.places for d in self.directories if not d.usable())

    def acquire(self, block_id: bytes) -> Location | None:
        """Where a block lies, leased; None when it is not here. See `release`."""
        for directory in self.in_use():
            place = directory.acquire(block_id)
            if place is not None:
                return Location(directory, place)
        return None

    def release(self, location: Location) -> None:
        """End the lease of `acquire`."""
        location.directory.slabs.unlease([location.place])

    # -- removal ------------------------------------------------------------------------------

    def remove(
        self, block_ids: Sequence[bytes], directories: Sequence[Directory] | None = None
    ) -> int:
        """Remove blocks from these directories, all by default, and free their slots.

        Returns how many this call removed: of two that remove the same block only one gets it.
        """
        removed: set[bytes] = set()
        for directory in self.directories if directories is None else directories:
            if directory.failure:
                continue
            taken = []
            for block_id in block_ids:
                packed = directory.places.pop(block_id, None)
                if packed is not None:
                    taken.append((block_id, Place.unpack(packed)))
                    removed.add(block_id)
            self.removed.extend(block_id for block_id, _ in taken)
            self._delete(directory, taken)
        return len(removed)

    def _delete(self, directory: Directory, rows: list[tuple[bytes, Place]]) -> None:
        """Delete rows and free their slots; what the index refuses is left to `retry_removals`."""
        for start in range(0, len(rows), ROWS_PER_COMMIT):
            some = rows[start : start + ROWS_PER_COMMIT]
            with suppress(DirectoryFailed), directory.guarded():
                try:
                    freed = directory.index.delete_at(directory.model, some)
                except IndexFull:
                    self.counters.add("index_refused")
                    directory.undeleted.extend(some)
                    continue
                directory.slabs.release(freed)

    def retry_removals(self, directory: Directory) -> bool:
        """Delete rows of removed blocks that the index had refused to. True when it did."""
        waiting = directory.undeleted
        rows = [waiting.popleft() for _ in range(len(waiting))]
        self._delete(directory, rows)
        return len(waiting) < len(rows)

    def remove_rows(
        self, directory: Directory, fingerprint: bytes, block_ids: Sequence[bytes]
    ) -> int:
        """Remove rows of another model, whose blocks nobody here reads or writes. Returns how many
        there were."""
        count = 0
        for start in range(0, len(block_ids), ROWS_PER_COMMIT):
            some = block_ids[start : start + ROWS_PER_COMMIT]
            with self.counters.refusals(), suppress(DirectoryFailed), directory.guarded():
                places = directory.index.delete(fingerprint, some)
                directory.slabs.release(places)
                count += len(places)
        return count

    def drop_damaged(self, block_id: bytes, location: Location) -> bool:
        """Remove a block that failed its checks; its slot is not used again before a restart.

        Call while it is leased. False when another thread has removed it already.
        """
        first = self.remove([block_id], [location.directory]) > 0
        if first:
            location.directory.slabs.quarantine(location.place)
        return first

    def drop_slab(self, directory: Directory, number: int) -> bool:
        """Remove a whole slab with every block in it. False while it is used."""
        mine = [i for i, packed in directory.places.copy().items() if packed >> 32 == number]
        self.remove(mine, [directory])
        with directory.guarded():
            return directory.slabs.drop(number)

    # -- use ----------------------------------------------------------------------------------

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """Note a use of a prefix path, in path order: a block never looks younger than its parent.

        Costs one append; written to the index by `flush_touches`.
        """
        self._touches.append((int(self.clock() * 1e6), 0, block_ids))

    def hit(self, block_id: bytes, position: int) -> None:
        """Note that a block was served."""
        self._touches.append((self.access_time(position), 1, (block_id,)))

    def access_time(self, position: int) -> int:
        """Microseconds since 1970, coarse on purpose and less by the block's position, so that the
        blocks of one prefix that are used together age from their end."""
        return int(self.clock()) // _ACCESS_QUANTUM_S * _ACCESS_QUANTUM_S * 1_000_000 - position

    def flush_touches(self) -> None:
        """Write the noted uses to the index."""
        uses: dict[bytes, tuple[int, int]] = {}
        while self._touches:
            try:
                when, hits, block_ids = self._touches.popleft()
            except IndexError:
                break
            for position, block_id in enumerate(block_ids):
                accessed, before = uses.get(block_id, (0, 0))
                uses[block_id] = (max(accessed, when - position), before + hits)
        for directory in self.in_use():
            mine = {name: use for name, use in uses.items() if name in directory.places}
            with self.counters.refusals(), suppress(DirectoryFailed), directory.guarded():
                directory.index.touch(directory.model, mine)


def _run(places: dict[bytes, int], block_ids: Sequence[bytes]) -> int:
    """How many of the first identities are in one directory, without a gap."""
    for count, block_id in enumerate(block_ids):
        if block_id not in places:
            return count
    return len(block_ids)
