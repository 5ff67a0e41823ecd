"""Which blocks of one model lie in which directory: the state that reads, writes, eviction and
scrubbing share.

A block lies whole in one directory. A directory that failed, or whose I/O keeps failing, is out of
use: its blocks are not found, and the other directories go on. Lookups go to dictionaries in
memory; leases keep the slot of a block that is being used from being reused under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from sglang_hc.store.disk.directory import Directory, DirectoryFailed, StoredModel
from sglang_hc.store.disk.index import ROWS_PER_COMMIT
from sglang_hc.store.disk.index_file import IndexFull, Place
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)

_ACCESS_QUANTUM_S = 10


class Counters:
    """What the store did since it was opened, and why blocks were not served. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Count something."""
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> Counter[str]:
        """All counters at one moment."""
        with self._lock:
            return self._values.copy()


class Location(NamedTuple):
    """A leased slot of one directory."""

    directory: Directory
    place: Place


class Catalog:
    """All blocks of one model over its directories. Thread-safe."""

    def __init__(
        self,
        directories: Sequence[Directory],
        model: StoredModel,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directories = tuple(directories)
        self.model = model
        self.clock = clock
        self.counted = Counters()
        self._removed: deque[bytes] = deque()
        self._in_use_before = set(self.directories)

    # -- directories --------------------------------------------------------------------------

    def in_use(self) -> list[Directory]:
        """The directories that may be asked now: neither failed nor paused because of failures."""
        return [directory for directory in self.directories if directory.usable()]

    def io_failed(self, directory: Directory) -> None:
        """A read or write of a slot failed. After several in a row the directory gets a pause."""
        if directory.breaker.failed():
            self.counted.add("directory_pauses")
            logger.error(
                "%s keeps failing; it is not used for a while, and its blocks are not found",
                directory.root,
            )

    def io_succeeded(self, directory: Directory) -> None:
        """A read or write of a slot came back well."""
        if directory.breaker.succeeded():
            logger.warning("%s answers again; it is used again", directory.root)

    def take_directory_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(identities in directories that are in use again, identities in those that went out of
        use), each since the last call. For one caller, who mirrors what can be read."""
        now = set(self.in_use())
        before, self._in_use_before = self._in_use_before, now
        back = [name for directory in now - before for name in directory.places.copy()]
        lost = [name for directory in before - now for name in directory.places.copy()]
        return back, lost

    @contextmanager
    def _if_possible(self, directory: Directory) -> Iterator[None]:
        """Index work that may be left undone: a refusal is counted, and a directory that fails has
        said so itself."""
        try:
            with directory.guarded():
                yield
        except IndexFull:
            self.counted.add("index_refused")
        except DirectoryFailed:
            pass

    # -- lookup -------------------------------------------------------------------------------

    def contains(self, block_ids: Sequence[bytes]) -> int:
        """How many of the first identities are here without a gap. A block in a directory that is
        out of use is not here. A yes is no promise: the read proves it."""
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

    def directory_of(self, block_id: bytes) -> Directory | None:
        """The directory in use that has this block; None when none has."""
        for directory in self.in_use():
            if block_id in directory.places:
                return directory
        return None

    def absence(self, block_id: bytes) -> Outcome:
        """The answer to a read of a block that `directory_of` does not find."""
        out = any(block_id in d.places for d in self.directories if not d.usable())
        outcome = Outcome.IO_ERROR if out else Outcome.MISSING
        self.counted.add(f"read_{outcome.value}")
        return outcome

    def __len__(self) -> int:
        return sum(len(directory.places) for directory in self.in_use())

    def block_ids(self) -> list[bytes]:
        """Identities of all blocks here, for whoever mirrors them from the start. One that lies in
        two directories is named twice."""
        return [name for directory in self.in_use() for name in directory.places.copy()]

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

    def drain_removed(self) -> list[bytes]:
        """Identities of blocks that left since the last call: evicted, expired, deleted, damaged.
        For whoever mirrors what is on disk; a block may have been written again meanwhile."""
        return [self._removed.popleft() for _ in range(len(self._removed))]

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
            self._removed.extend(block_id for block_id, _ in taken)
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
                    self.counted.add("index_refused")
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
            with self._if_possible(directory):
                some = block_ids[start : start + ROWS_PER_COMMIT]
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
        """Note that a prefix path was used, wherever it was served from; identities in path order,
        so that a block never looks younger than its parent. Blocks that are not here are ignored.
        The sequence must not change afterwards.

        Costs one append for each directory; written to the index by `flush_touches`.
        """
        now = int(self.clock() * 1e6)
        for directory in self.directories:
            directory.touches.append((now, 0, block_ids))

    def hit(self, directory: Directory, block_id: bytes, position: int) -> None:
        """Note that a block was served."""
        directory.touches.append((self.access_time(position), 1, (block_id,)))

    def access_time(self, position: int) -> int:
        """Microseconds since 1970, coarse on purpose and less by the block's position, so that the
        blocks of one prefix that are used together age from their end."""
        return int(self.clock()) // _ACCESS_QUANTUM_S * _ACCESS_QUANTUM_S * 1_000_000 - position

    def flush_touches(self, directory: Directory) -> None:
        """Write the noted uses of one directory's blocks to its index."""
        uses: dict[bytes, tuple[int, int]] = {}
        with suppress(IndexError):  # another thread may take the last one
            while directory.touches:
                when, hits, block_ids = directory.touches.popleft()
                for position, block_id in enumerate(block_ids):
                    if block_id in directory.places:
                        accessed, before = uses.get(block_id, (0, 0))
                        uses[block_id] = (max(accessed, when - position), before + hits)
        with self._if_possible(directory):
            directory.index.touch(directory.model, uses)


def _run(places: dict[bytes, int], block_ids: Sequence[bytes]) -> int:
    """How many of the first identities are in one directory, without a gap."""
    for count, block_id in enumerate(block_ids):
        if block_id not in places:
            return count
    return len(block_ids)
