"""One open `--hc-disk` directory: its index, its slabs and this model's blocks in it."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from sglang_hc.store.circuit_breaker import CircuitBreaker
from sglang_hc.store.disk.backend import FILE_MODE
from sglang_hc.store.disk.format import StoredModel
from sglang_hc.store.disk.index import ROWS_PER_COMMIT, Index
from sglang_hc.store.disk.index_file import IndexDamaged, IndexFull, Place, Row
from sglang_hc.store.disk.slabs import SlabSet

logger = logging.getLogger(__name__)

FOLDER = "sglang-hc"
INDEX_NAME = "index.sqlite"
DAMAGED_NAME = "index.damaged"
LOCK_NAME = "lock"
GIGABYTE = 10**9
_TOUCHES_KEPT = 1 << 16
_ACCESS_QUANTUM_S = 10
_SILENCE_S = 60.0


_STARTED = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since 1970 as the system's clock said when this process began. Steps of that clock
    change nothing: no pause takes an hour longer, and no block grows a year older at once."""
    return _STARTED + time.monotonic()


class DirectoryError(Exception):
    """A directory that cannot be used. The message names it and the remedy, for users."""


class DirectoryLost(DirectoryError):
    """The device of a directory fails. That is not the user's mistake; other directories may
    work."""


@dataclass(frozen=True)
class DirectorySpec:
    """One `--hc-disk DIR[:SIZE_GB]`. size_bytes None: a share of what is free at start.

    users: stores that divide this disk among them, each in a directory of its own.
    """

    path: str
    size_bytes: int | None = None
    users: int = 1

    @classmethod
    def parse(cls, text: str) -> DirectorySpec:
        """Raises DirectoryError. Only a last part that is a number is a size: `/a:b` is a path, and
        `/a:200GB` is neither."""
        match = re.fullmatch(r"(?s)(.+):([0-9]+(?:\.[0-9]+)?)", text)
        if match is None:
            if not text or re.search(r":-?[0-9.]*([0-9][^/:]*)?$", text):
                raise DirectoryError(
                    f"--hc-disk {text!r}: give DIR or DIR:SIZE_GB, for example /mnt/ssd:200"
                )
            return cls(text)
        size = int(float(match[2]) * GIGABYTE)
        if size <= 0:
            raise DirectoryError(f"--hc-disk {text!r}: the size must be more than 0 GB")
        return cls(match[1], size)

    def for_user(self, name: str, users: int) -> DirectorySpec:
        """The part of this disk that one of `users` stores has: a folder, and its share of room."""
        size = None if self.size_bytes is None else self.size_bytes // users
        return DirectorySpec(os.path.join(self.path, name), size, users * self.users)


class Directory:
    """An open directory for one model: where its blocks lie, and which were used when. Thread-safe.

    Made by `opening.open_directory`. lock: descriptor that holds the lock. number: the model's in
    this index.

    places: block identity -> packed `Place` of this model's blocks. A dictionary that is only
    changed by the store; looking into it needs no lock. breaker: gives the directory a pause when
    its I/O keeps failing. failure: why it is out of use until a restart. hangs: a thread has not
    come back from it. unerased: what was forgotten, but is still on the disk. making_room: held by
    the thread that evicts.
    """

    def __init__(
        self,
        root: str,
        lock: int,
        index: Index,
        slabs: SlabSet,
        model: StoredModel,
        number: int,
        clock: Callable[[], float],
    ) -> None:
        self.root = root
        self.index = index
        self.slabs = slabs
        self.model = model
        self.number = number
        self.clock = clock
        self.breaker = CircuitBreaker(clock)
        self.places: dict[bytes, int] = {}
        self.unerased: dict[bytes, int] = {}
        self.failure: str | None = None
        self.hangs = False
        self.making_room = threading.Lock()
        self._lock_file = lock
        self._removed: deque[bytes] | None = None
        """None until somebody asks: nobody mirrors the disk in most processes that have one."""
        self._undeleted: deque[Row] = deque()
        """Owners of slots whose rows the index would not delete yet."""
        self._touches: deque[tuple[int, int, Sequence[bytes]]] = deque(maxlen=_TOUCHES_KEPT)
        """Uses that the index was not told of yet: (microseconds since 1970, hits, identities in
        path order)."""
        self._silent_until = 0.0
        self._counting = threading.Lock()
        self._counted: Counter[str] = Counter()

    def load(self) -> None:
        """Read where the blocks lie. Raises IndexDamaged."""
        places = self.index.places(self.number)
        taken = [*places.values(), *self.index.other_places(self.number)]
        if not {*map(type, places)} <= {bytes}:
            raise IndexDamaged("a row holds values of a wrong type")
        try:
            packed = np.fromiter(taken, dtype=np.int64, count=len(taken))
        except (TypeError, ValueError, OverflowError) as error:
            raise IndexDamaged(f"a row holds something else than a place: {error}") from error
        self.slabs.adopt(packed)
        self.places = places

    # -- health -------------------------------------------------------------------------------

    def usable(self) -> bool:
        """Whether this directory may be asked now. Cheap; takes no lock."""
        return self.failure is None and not self.hangs and self.breaker.allows()

    def count(self, name: str, amount: int = 1) -> None:
        """Count something that no answer to a read or a write tells."""
        with self._counting:
            self._counted[name] += amount

    def counters(self) -> Counter[str]:
        """All that was counted since the directory was opened."""
        with self._counting:
            return self._counted.copy()

    def io_failed(self) -> None:
        """A read or write of a slot failed. After several in a row the directory gets a pause."""
        if self.breaker.failed():
            self.count("directory_pauses")
            logger.error(
                "%s keeps failing; it is not used for a while, and its blocks are not found",
                self.root,
            )

    def io_succeeded(self) -> None:
        """A read or write of a slot came back well."""
        if self.breaker.succeeded():
            logger.warning("%s answers again; it is used again", self.root)

    def note_hang(self, hangs: bool) -> None:
        """Whether its disk answers; one that does not is out of use until it does."""
        if hangs != self.hangs:
            self.hangs = hangs
            self.count("directory_hangs", int(hangs))
            state = "does not answer; it is not used until it does" if hangs else "answers again"
            logger.error("%s %s", self.root, state)

    def index_refused(self, error: IndexFull) -> None:
        """The index did not take a change. Each time is counted, one in a minute is logged."""
        self.count("index_refused")
        now = self.clock()
        if now >= self._silent_until:
            self._silent_until = now + _SILENCE_S
            logger.warning("%s: the index takes no changes now: %s", self.root, error)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Index work. A damaged index takes the directory out of use; IndexDamaged is raised then,
        and from then on."""
        if self.failure:
            raise IndexDamaged(self.failure)
        try:
            yield
        except IndexDamaged as error:
            self.fail(f"the index is damaged: {error}")
            raise

    @contextmanager
    def _if_possible(self) -> Iterator[None]:
        """Index work that may be left undone. A refusal is counted; `guarded` tells of damage."""
        try:
            with self.guarded():
                yield
        except IndexFull as error:
            self.index_refused(error)
        except IndexDamaged:
            pass

    def fail(self, reason: str) -> None:
        """Take the directory out of use; the index is rebuilt at the next start."""
        if self.failure is None:
            self.failure = reason
            logger.error(
                "%s: %s. Its blocks are not found until a restart; requests and other directories "
                "go on. The next start rebuilds the index, or run: sglang-hc fsck %s --repair",
                self.root,
                reason,
                os.path.dirname(self.root),
            )
            try:
                os.close(os.open(os.path.join(self.root, DAMAGED_NAME), os.O_CREAT, FILE_MODE))
            except OSError as error:
                logger.error("%s: cannot leave a mark: %s", self.root, error)

    # -- blocks -------------------------------------------------------------------------------

    def acquire(self, block_id: bytes) -> Place | None:
        """Where a block of this model lies, with a lease on its slot, so that the slot is not used
        again meanwhile; None when the block is not here."""
        while True:
            packed = self.places.get(block_id)
            if packed is None:
                return None
            place = Place.unpack(packed)
            if not self.slabs.lease(place):
                self.remove([block_id])  # its slab is gone: it is not found again
                return None
            if self.places.get(block_id) == packed:
                return place
            self.slabs.unlease([place])  # it moved meanwhile

    def free_slots(self) -> int:
        """Slots that can be taken without evicting anything."""
        size = self.model.slot_bytes
        used, there = self.slabs.usage(size)
        return there - used + self.slabs.growable_slots(size)

    def remove(self, block_ids: Iterable[bytes]) -> int:
        """Remove blocks of this model and free their slots. Returns how many this call removed: of
        two that remove the same block only one gets it."""
        if self.failure:
            return 0
        owners = []
        for block_id in block_ids:
            packed = self.places.pop(block_id, None)
            if packed is not None:
                owners.append(Row(self.number, block_id, *Place.unpack(packed)))
        return self._removed_from_memory(owners)

    def _removed_from_memory(self, owners: Sequence[Row]) -> int:
        if self._removed is not None:
            self._removed.extend(owner.block_id for owner in owners)
        self._delete(owners)
        return len(owners)

    def forget(self) -> dict[bytes, int]:
        """Nothing that was here is found from now on; for `delete_forgotten`. Waits for no disk."""
        forgotten = self.unerased | self.places
        self.places, self.unerased = {}, {}
        return forgotten

    def delete_forgotten(self, forgotten: dict[bytes, int]) -> int:
        """Delete the rows and free the slots of what was forgotten; returns how many."""
        if self.failure:
            return 0
        owners = (Row(self.number, name, *Place.unpack(at)) for name, at in [*forgotten.items()])
        return self._removed_from_memory([*owners])

    def remove_rows(self, rows: Sequence[Row]) -> int:
        """Remove blocks of any model. Returns how many this call removed."""
        count = self.remove(row.block_id for row in rows if row.model == self.number)
        return count + self._delete([row for row in rows if row.model != self.number])

    def disown(self, rows: Sequence[Row]) -> list[Place]:
        """Remove at most ROWS_PER_COMMIT blocks of any model. Returns the slots of those that this
        call removed, which stay taken: they are the caller's. Raises IndexDamaged, IndexFull."""
        mine = [row for row in rows if row.model == self.number]
        for row in mine:
            if self.places.get(row.block_id) == row.place.pack():
                self.places.pop(row.block_id, None)
        if self._removed is not None:
            self._removed.extend(row.block_id for row in mine)
        with self.guarded():
            try:
                return self.index.delete(rows)
            except IndexFull:
                self._undeleted.extend(mine)
                raise

    def drop_damaged(self, owner: Row) -> bool:
        """Remove a block that failed its checks; its slot is not used again before a restart.

        Call while the slot is leased. False when another thread has removed it already.
        """
        mine = owner.model == self.number
        first = (self.remove([owner.block_id]) if mine else self._delete([owner])) > 0
        if first:
            self.slabs.quarantine(owner.place)
        return first

    def drop_slab(self, number: int) -> bool:
        """Remove a whole slab with every block in it. False while it is used."""
        self.remove([i for i, packed in self.places.copy().items() if packed >> 32 == number])
        with self.guarded():
            return self.slabs.drop(number)

    def _delete(self, owners: Sequence[Row]) -> int:
        """Delete rows and free their slots; what the index refuses is left to `retry_removals`.
        Returns how many slots are free."""
        count = 0
        for start in range(0, len(owners), ROWS_PER_COMMIT):
            some = owners[start : start + ROWS_PER_COMMIT]
            with self._if_possible():
                try:
                    freed = self.index.delete(some)
                except IndexFull:
                    self._undeleted.extend(one for one in some if one.model == self.number)
                    raise
                self.slabs.release(freed)
                count += len(freed)
        return count

    @property
    def is_owed_removals(self) -> bool:
        """The index refuses to delete rows of blocks that were removed: their slots stay taken."""
        return bool(self._undeleted)

    def retry_removals(self) -> bool:
        """Delete rows of removed blocks that the index had refused to. True when it did. A block
        that was written again to the same slot meanwhile keeps its row."""
        rows = [self._undeleted.popleft() for _ in range(len(self._undeleted))]
        live = self.places
        return self._delete([r for r in rows if live.get(r.block_id) != r.place.pack()]) > 0

    def take_removed(self) -> list[bytes]:
        """Identities of blocks that left since the last call; nothing is noted before the first."""
        if self._removed is None:
            self._removed = deque()
        return [self._removed.popleft() for _ in range(len(self._removed))]

    # -- use ----------------------------------------------------------------------------------

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """See `DiskStore.touch`."""
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
        with suppress(IndexError):  # another thread may take the last one
            while self._touches:
                when, hits, block_ids = self._touches.popleft()
                for position, block_id in enumerate(block_ids):
                    if block_id in self.places:
                        accessed, before = uses.get(block_id, (0, 0))
                        uses[block_id] = (max(accessed, when - position), before + hits)
        with self._if_possible():
            self.index.touch(self.number, uses)

    def close(self) -> None:
        """Close everything and give the lock back."""
        self.slabs.close()
        self.index.close()
        os.close(self._lock_file)


def used_bytes(root: str) -> int:
    """Sizes of all files in a store's folder."""
    total = 0
    for entry in os.scandir(root):
        with suppress(FileNotFoundError):
            total += entry.stat(follow_symlinks=False).st_size
    return total
