"""Which blocks of one model are on which directories: the state that reads, writes, eviction and
scrubbing share.

A block is present when every share of it is. Lookups go to dictionaries in memory; leases keep the
slots of a block that is being used from being reused under it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from sglang_hc.store.disk.circuit_breaker import CircuitBreaker
from sglang_hc.store.disk.counters import Counters
from sglang_hc.store.disk.directory import Directory, DirectoryFailed
from sglang_hc.store.disk.format import Chunk, Striping
from sglang_hc.store.disk.index import ROWS_PER_COMMIT
from sglang_hc.store.disk.schema import IndexFull, Place
from sglang_hc.store.disk.slabs import Slot

logger = logging.getLogger(__name__)

_ACCESS_QUANTUM_S = 10
_TOUCHES_KEPT = 1 << 16


class Share(NamedTuple):
    """One leased share of a block. chunks: what lies in the slot, in order."""

    directory: Directory
    place: Place
    chunks: tuple[Chunk, ...]

    @property
    def slot(self) -> Slot:
        return self.place.slab, self.place.slot


class Catalog:
    """All blocks of one model over its directories. Thread-safe once `settle` has returned."""

    def __init__(
        self,
        directories: Sequence[Directory],
        striping: Striping,
        fingerprint: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directories = tuple(directories)
        self.striping = striping
        self.fingerprint = fingerprint
        self.clock = clock
        self.counters = Counters()
        self.breaker = CircuitBreaker(clock)
        self.removed: deque[bytes] = deque()
        self._touches: deque[tuple[int, int, Sequence[bytes]]] = deque(maxlen=_TOUCHES_KEPT)
        self._legacy: dict[bytes, tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._undeleted: list[deque[tuple[bytes, Place]]] = [deque() for _ in directories]
        self._striping_of = lru_cache(maxsize=16)(lambda n: Striping(striping.chunks, n))

    # -- start --------------------------------------------------------------------------------

    def settle(self) -> None:
        """After opening: find blocks dealt over another number of directories, and remove those of
        which a crash or a lost disk left only some shares."""
        self._find_legacy()
        if len(self.directories) == 1:
            return
        whole = set(self.directories[0].catalog)
        for directory in self.directories[1:]:
            whole &= directory.catalog.keys()
        partial: set[bytes] = set()
        for directory in self.directories:
            partial |= directory.catalog.keys() - whole
        if partial:
            logger.warning("removing %d blocks of which a share is missing", len(partial))
            self.counters.add("incomplete_blocks", len(partial))
            self.remove_rows(self.fingerprint, sorted(partial))
            for directory in self.directories:
                for block_id in partial:
                    directory.catalog.pop(block_id, None)

    def _find_legacy(self) -> None:
        found: dict[tuple[bytes, int], dict[int, tuple[int, int]]] = {}
        for number, directory in enumerate(self.directories):
            for block_id, packed, stripes in directory.others:
                shares = found.setdefault((block_id, stripes), {})
                shares[packed & 0xFF] = (number, packed)
            directory.others = []
        self._legacy = {
            block_id: (stripes, tuple(shares.values()))
            for (block_id, stripes), shares in found.items()
            if 0 < stripes == len(shares)
        }

    # -- lookup -------------------------------------------------------------------------------

    def usable(self) -> bool:
        """Whether the disks may be asked at all now."""
        return self.breaker.allows() and not any(d.failure for d in self.directories)

    def leading(self, block_ids: Sequence[bytes]) -> int:
        """How many of the first identities are present, without a gap."""
        if not self.usable():
            return 0
        count = len(block_ids)
        for directory in self.directories:
            count = _run(directory.catalog, block_ids, count)
        if self._legacy and count < len(block_ids):
            while count < len(block_ids) and self._known(block_ids[count]):
                count += 1
        return count

    def _known(self, block_id: bytes) -> bool:
        return block_id in self._legacy or all(block_id in d.catalog for d in self.directories)

    def __contains__(self, block_id: bytes) -> bool:
        return self.leading((block_id,)) == 1

    def __len__(self) -> int:
        return min(len(d.catalog) for d in self.directories) + len(self._legacy)

    def ids(self) -> list[bytes]:
        """Identities of all blocks present."""
        return [*self.directories[0].catalog.copy(), *self._legacy.copy()]

    def acquire(self, block_id: bytes) -> list[Share] | None:
        """All shares of a block, leased; None when the block is not here. See `release`."""
        shares: list[Share] = []
        stripes, places = self._legacy.get(block_id, (self.striping.stripes, ()))
        in_catalogs = not places or block_id in self.directories[0].catalog
        if in_catalogs:
            stripes = self.striping.stripes
            for directory in self.directories:
                place = directory.acquire(block_id)
                if place is None:
                    break
                shares.append(self._share(directory, place, stripes))
        else:
            for number, packed in places:
                place = Place.unpack(packed)
                directory = self.directories[number]
                if not directory.slabs.lease(place[:2]):
                    break
                shares.append(self._share(directory, place, stripes))
            if self._legacy.get(block_id) != (stripes, places):
                self.release(shares)
                return None
        if len(shares) < stripes or len({share.place.residue for share in shares}) < stripes:
            self.release(shares)
            return None
        return shares

    def _share(self, directory: Directory, place: Place, stripes: int) -> Share:
        shares = self._striping_of(stripes).shares
        chunks = shares[place.residue] if place.residue < len(shares) else ()
        return Share(directory, place, chunks)

    def release(self, shares: Iterable[Share]) -> None:
        """End the leases of `acquire`."""
        for share in shares:
            share.directory.slabs.unlease([share.slot])

    # -- removal ------------------------------------------------------------------------------

    def remove(self, block_ids: Iterable[bytes]) -> int:
        """Remove blocks from every directory and free their slots. Returns how many this call
        removed: of two that remove the same block at once only one gets it.
        """
        taken: list[list[tuple[bytes, Place]]] = [[] for _ in self.directories]
        count = 0
        for block_id in block_ids:
            # A block is published in the first directory last, so one that is there is complete.
            places = self._legacy.pop(block_id, (0, ()))[1]
            if self.directories[0].catalog.get(block_id) is not None:
                places += self._pop(block_id)
            for number, packed in places:
                taken[number].append((block_id, Place.unpack(packed)))
            if places:
                count += 1
                self.removed.append(block_id)
        for number, shares in enumerate(taken):
            self._delete(number, shares)
        return count

    def _delete(self, number: int, shares: list[tuple[bytes, Place]]) -> None:
        """Delete rows and free their slots; what the index refuses is left to `retry_removals`."""
        directory = self.directories[number]
        for start in range(0, len(shares), ROWS_PER_COMMIT):
            some = shares[start : start + ROWS_PER_COMMIT]
            with suppress(DirectoryFailed), directory.guarded():
                try:
                    freed = directory.index.delete_at(directory.model, some)
                except IndexFull:
                    self.counters.add("index_refused")
                    self._undeleted[number].extend(some)
                    continue
                directory.slabs.release(place[:2] for place in freed)

    def retry_removals(self) -> bool:
        """Delete rows of removed blocks that an index had refused to. True when some are gone."""
        done = False
        for number, waiting in enumerate(self._undeleted):
            shares = [waiting.popleft() for _ in range(len(waiting))]
            self._delete(number, shares)
            done = done or len(waiting) < len(shares)
        return done

    def _pop(self, block_id: bytes) -> tuple[tuple[int, int], ...]:
        first = self.directories[0].catalog.pop(block_id, None)
        if first is None:  # another thread was quicker
            return ()
        rest = (
            (number, directory.catalog.pop(block_id, None))
            for number, directory in enumerate(self.directories[1:], start=1)
        )
        return ((0, first), *((number, packed) for number, packed in rest if packed is not None))

    def remove_rows(self, fingerprint: bytes, block_ids: Sequence[bytes]) -> int:
        """Remove whatever rows there are of blocks that nobody here reads or writes: another
        model's, or incomplete ones at start. Returns how many rows went."""
        count = 0
        for directory in self.directories:
            for start in range(0, len(block_ids), ROWS_PER_COMMIT):
                some = block_ids[start : start + ROWS_PER_COMMIT]
                with self.counters.refusals(), suppress(DirectoryFailed), directory.guarded():
                    places = directory.index.delete(fingerprint, some)
                    directory.slabs.release(place[:2] for place in places)
                    count += len(places)
        return count

    def drop_damaged(self, block_id: bytes, bad: Share | None) -> bool:
        """Remove a block that failed its checks; `bad`'s slot is not used again before a restart.

        Call while its shares are leased. False when another thread has removed it already.
        """
        first = self.remove([block_id]) > 0
        if first and bad is not None:
            bad.directory.slabs.quarantine(bad.slot)
        return first

    def drop_slab(self, directory: Directory, number: int) -> bool:
        """Remove a whole slab with every block that has a share in it. False while it is used."""
        mine = [i for i, packed in directory.catalog.copy().items() if packed >> 32 == number]
        self.remove(mine)
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
        if not uses:
            return
        for directory in self.directories:
            with self.counters.refusals(), suppress(DirectoryFailed), directory.guarded():
                directory.index.touch(directory.model, uses)


def _run(catalog: dict[bytes, int], block_ids: Sequence[bytes], most: int) -> int:
    """How many of the first `most` identities are in the catalog without a gap."""
    for count, block_id in enumerate(block_ids):
        if count == most or block_id not in catalog:
            return count
    return most
