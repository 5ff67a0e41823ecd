"""Slab files of one directory: which exist, which slots are taken, who is using them.

A slot is free, taken (a row of the index owns it, or a write that has not published yet), or in
quarantine (taken until the next start, because its bytes were found damaged). A lease keeps a taken
slot from being reused while its bytes are read or written. Thread-safe; no lock is held over
reading or writing of slots.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hc.store.disk.backend import FULL, DirectBackend, File, aligned_buffer
from sglang_hc.store.disk.format import SLAB_HEADER_BYTES, FormatError, SlabHeader
from sglang_hc.store.disk.index import Index
from sglang_hc.store.disk.index_file import IndexDamaged, Place, UnknownVersion

logger = logging.getLogger(__name__)

_SLABS = 64
_LEAST_SLABS = 16
_LEAST_BYTES = 256 << 20
_MAX_SLOTS = 1 << 20
_RETRY_GROWTH_S = 60.0


@dataclass
class _Slab:
    """One open slab. taken: one byte per slot, 1 when not free. cursor: where to look next."""

    header: SlabHeader
    file: File
    taken: bytearray
    used: int = 0
    cursor: int = 0


class SlabSet:
    """The slabs of one directory within `data_bytes`."""

    def __init__(
        self,
        root: str,
        backend: DirectBackend,
        index: Index,
        data_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._root = root
        self._backend = backend
        self._index = index
        self._clock = clock
        self._lock = threading.Lock()
        self._grow_lock = threading.Lock()
        self._slabs: dict[int, _Slab] = {}
        self._leases: Counter[Place] = Counter()
        self._doomed: set[Place] = set()
        """Leased slots that nothing owns any more: free when the lease ends."""
        self._growth_resumes = 0.0
        self.data_bytes = data_bytes
        self.quarantined: set[Place] = set()

    # -- opening ------------------------------------------------------------------------------

    def open_all(self) -> None:
        """Open every slab of the index and tidy what a crash left: files without a row are removed,
        and so are the rows of slabs whose file is lost. Raises OSError and what Index raises.
        """
        known = {row.slab: row for row in self._index.slabs()}
        there = set(slab_numbers(self._root))
        for number in there - known.keys():
            self._backend.unlink(slab_path(self._root, number))
        for number in known.keys() - there:
            logger.warning("%s: slab %d is gone; its blocks are lost", self._root, number)
            self._index.drop_slab(number)
        for number in sorted(there & known.keys()):
            self._slabs[number] = self._open(known[number])

    def _open(self, header: SlabHeader) -> _Slab:
        file = self._backend.open(slab_path(self._root, header.slab))
        try:
            _compare(file, header)
        except BaseException:
            file.close()
            raise
        if file.size() < header.file_bytes:
            logger.warning("%s: slab %d was cut short; extending it", self._root, header.slab)
            try:
                file.allocate(header.file_bytes)
            except OSError as error:
                logger.warning("%s: slab %d stays short: %s", self._root, header.slab, error)
        return _Slab(header, file, bytearray(header.slots))

    def adopt(self, places: npt.NDArray[np.int64]) -> None:
        """Mark the slots of packed places (`Place.pack`) as taken. Unknown slabs are ignored: what
        points there is found out when it is read."""
        if not len(places):
            return
        places = np.sort(places)
        numbers, starts = np.unique(places >> 32, return_index=True)
        for number, some in zip(numbers.tolist(), np.split(places, starts[1:]), strict=True):
            slab = self._slabs.get(number)
            if slab is None:
                continue
            slots = some & 0xFFFFFFFF
            taken = np.frombuffer(slab.taken, dtype=np.uint8)
            taken[slots[slots < slab.header.slots]] = 1
            slab.used = int(taken.sum())

    # -- allocation ---------------------------------------------------------------------------

    def allocate(self, slot_bytes: int, behind: Place | None = None, more: int = 0) -> Place | None:
        """Take a free slot of exactly this size, with a lease on it; None when there is none.

        behind: the slot that comes next, if it is free. Otherwise one with `more` free slots after
        it, or as many as there are anywhere; other threads are given slots elsewhere meanwhile.
        """
        with self._lock:
            place = None if behind is None else Place(behind.slab, behind.slot + 1)
            if place is None or not self._is_free(place):
                place = self._start_of_run(slot_bytes, more + 1)
            if place is not None:
                self._take(place)
            return place

    def _take(self, place: Place) -> None:
        slab = self._slabs[place.slab]
        slab.used += not slab.taken[place.slot]
        slab.taken[place.slot] = 1
        self._leases[place] += 1

    def _is_there(self, place: Place) -> bool:
        slab = self._slabs.get(place.slab)
        return slab is not None and place.slot < slab.header.slots

    def _is_free(self, place: Place) -> bool:
        return self._is_there(place) and not self._slabs[place.slab].taken[place.slot]

    def _start_of_run(self, slot_bytes: int, count: int) -> Place | None:
        """The first of `count` free slots side by side; of half as many where there are none."""
        slabs = [
            (number, slab)
            for number, slab in self._slabs.items()
            if slab.header.slot_bytes == slot_bytes and slab.used < slab.header.slots
        ]
        while slabs and count:
            free = bytes(count)
            for number, slab in slabs:
                slot = slab.taken.find(free, slab.cursor)
                if slot < 0:
                    slot = slab.taken.find(free)
                if slot >= 0:
                    slab.cursor = slot + count
                    return Place(number, slot)
            count //= 2
        return None

    def grow(self, slot_bytes: int) -> bool:
        """Add a slab for this slot size. False when the budget or the disk has no room."""
        with self._grow_lock:
            now = self._clock()
            if now < self._growth_resumes:
                return False
            room = self.data_bytes - self.file_bytes() - SLAB_HEADER_BYTES
            slots = min(self._slab_slots(slot_bytes), room // slot_bytes)
            if slots < 1:
                return False
            number = max(self._slabs, default=0) + 1
            header = SlabHeader(number, slot_bytes, slots, int(now * 1e6))
            try:
                file = self._create(header)
            except OSError as error:
                if error.errno not in (*FULL, errno.EFBIG):
                    raise
                self._growth_resumes = now + _RETRY_GROWTH_S
                logger.warning(
                    "%s: no room for another slab of %d bytes (%s); using the slabs there are",
                    self._root,
                    header.file_bytes,
                    error,
                )
                return False
            with self._lock:
                self._slabs[number] = _Slab(header, file, bytearray(slots))
            return True

    def _slab_slots(self, slot_bytes: int) -> int:
        """Slots of a new slab: a small share of the data, but not so small that a batch of blocks
        is spread over many files that must all be synced."""
        size = max(self.data_bytes // _SLABS, min(_LEAST_BYTES, self.data_bytes // _LEAST_SLABS))
        return min(max(1, size // slot_bytes), _MAX_SLOTS)

    def prepare(self, slot_bytes: int) -> None:
        """Add a slab ahead of need when less than half of one is free, so that writers do not wait
        for its creation. Raises OSError."""
        used, there = self.usage(slot_bytes)
        if used and there - used < self._slab_slots(slot_bytes) // 2:
            self.grow(slot_bytes)

    def _create(self, header: SlabHeader) -> File:
        path = slab_path(self._root, header.slab)
        file = self._backend.open(path, create=True)
        try:
            page = aligned_buffer(SLAB_HEADER_BYTES)
            page[:] = header.pack()
            # Before the preallocation: on ext4 a written first page inside the preallocated extent
            # makes every later write two to four times slower.
            file.write([page], 0)
            file.allocate(header.file_bytes)
            file.sync()
            self._backend.sync_directory(self._root)
            self._index.add_slab(header)
        except BaseException:
            file.close()
            self._backend.unlink(path)
            raise
        return file

    def release(self, slots: Iterable[Place]) -> None:
        """Free slots that no row owns any more; those under lease when the lease ends. Slots in
        quarantine stay there."""
        with self._lock:
            for slot in slots:
                if slot in self._leases:
                    self._doomed.add(slot)
                else:
                    self._free(slot)

    def quarantine(self, slot: Place) -> None:
        """Keep a leased slot out of use until the next start, whoever releases it."""
        with self._lock:
            self.quarantined.add(slot)

    def _free(self, slot: Place) -> None:
        if self._is_there(slot) and slot not in self.quarantined:
            slab = self._slabs[slot.slab]
            slab.used -= slab.taken[slot.slot]
            slab.taken[slot.slot] = 0

    def unowned(self, number: int) -> list[Place]:
        """Slots of a slab that are free or in quarantine."""
        with self._lock:
            taken = self._slabs[number].taken if number in self._slabs else b""
            free = [Place(number, slot) for slot, is_taken in enumerate(taken) if not is_taken]
            return free + [place for place in self.quarantined if place.slab == number]

    def leased(self) -> set[Place]:
        with self._lock:  # what somebody reads or writes
            return set(self._leases)

    def claim(self, places: Iterable[Place]) -> tuple[list[Place], set[Place]]:
        """Take and lease what is free or in quarantine; returns it, and what others have leased."""
        mine, in_use = [], set()
        with self._lock:
            for place in places:
                if place in self._leases:
                    in_use.add(place)
                elif self._is_there(place) and (self._is_free(place) or place in self.quarantined):
                    self._take(place)
                    mine.append(place)
        return mine, in_use

    # -- use ----------------------------------------------------------------------------------

    def lease(self, slot: Place) -> bool:
        """Keep a slot from being reused. False when there is no such slot."""
        with self._lock:
            there = self._is_there(slot)
            if there:
                self._leases[slot] += 1
            return there

    def unlease(self, slots: Iterable[Place]) -> None:
        """End leases, one for each slot named."""
        with self._lock:
            for slot in slots:
                self._leases[slot] -= 1
                if not self._leases[slot]:
                    del self._leases[slot]
                    if slot in self._doomed:
                        self._doomed.remove(slot)
                        self._free(slot)

    def read(self, slot: Place, buffers: Sequence[memoryview], offset: int = 0) -> int:
        """Read from a leased slot. Returns the bytes read, fewer where the file ends early."""
        slab = self._slabs[slot.slab]
        return slab.file.read(buffers, slab.header.offset(slot.slot) + offset)

    def write(self, slot: Place, buffers: Sequence[memoryview]) -> None:
        """Write the start of a leased slot."""
        slab = self._slabs[slot.slab]
        slab.file.write(buffers, slab.header.offset(slot.slot))

    def sync(self, numbers: Iterable[int]) -> None:
        """Make what was written to these slabs durable."""
        for number in sorted(set(numbers)):
            self._slabs[number].file.sync()

    # -- whole slabs --------------------------------------------------------------------------

    def drop(self, number: int) -> bool:
        """Remove a slab with all its rows and its file. False while one of its slots is leased."""
        with self._grow_lock:  # its room is not given away before the file is gone
            with self._lock:
                if number not in self._slabs or any(p.slab == number for p in self._leases):
                    return False
                slab = self._slabs.pop(number)
                self.quarantined = {place for place in self.quarantined if place.slab != number}
            try:
                self._index.drop_slab(number)
            except BaseException:
                with self._lock:
                    self._slabs[number] = slab
                raise
            slab.file.close()
            self._backend.unlink(slab_path(self._root, number))
            self._backend.sync_directory(self._root)
        return True

    def sizes(self) -> dict[int, int]:
        """Slot size of each slab in use."""
        with self._lock:
            return {number: slab.header.slot_bytes for number, slab in self._slabs.items()}

    def file_bytes(self) -> int:
        with self._lock:
            return sum(slab.header.file_bytes for slab in self._slabs.values())

    def usage(self, slot_bytes: int) -> tuple[int, int]:
        """(slots taken, slots there are) of this size."""
        with self._lock:
            chosen = [s for s in self._slabs.values() if s.header.slot_bytes == slot_bytes]
            return sum(s.used for s in chosen), sum(s.header.slots for s in chosen)

    def growable_slots(self, slot_bytes: int) -> int:
        """Slots of this size that the budget still has room for."""
        if self._clock() < self._growth_resumes:
            return 0
        return max(0, self.data_bytes - self.file_bytes() - SLAB_HEADER_BYTES) // slot_bytes

    def check(self, owned: Collection[Place]) -> None:
        """Raises AssertionError unless these slots and those in quarantine are the ones taken, and
        none is leased."""
        with self._lock:
            assert not self._leases, "leases without an operation"
            slabs = self._slabs.items()
            taken = {Place(n, slot) for n, slab in slabs for slot, t in enumerate(slab.taken) if t}
        assert taken.issuperset(owned), "a row whose slot is free"
        assert len(taken) == len({*owned, *self.quarantined}), "a taken slot without a row"

    def close(self) -> None:
        with self._lock:
            for slab in self._slabs.values():
                slab.file.close()
            self._slabs.clear()


def _compare(file: File, expected: SlabHeader) -> None:
    """Raises IndexDamaged unless the row agrees with the slab's header or, where that is damaged,
    with the file's size: a wrong row must not make a file grow."""
    try:
        same = read_slab_header(file) == expected
    except FormatError:
        same = file.size() == expected.file_bytes
    if not same:
        raise IndexDamaged(f"slab {expected.slab} is not as its row says")


def read_slab_header(file: File) -> SlabHeader:
    """Raises FormatError when it is damaged, UnknownVersion, OSError."""
    page = aligned_buffer(SLAB_HEADER_BYTES)
    file.read([page], 0)
    try:
        return SlabHeader.unpack(page)
    except FormatError as error:
        if error.version is not None:
            raise UnknownVersion(str(error.version)) from error
        raise


def slab_path(root: str, number: int) -> str:
    return os.path.join(root, f"slab-{number:08d}.dat")


def slab_numbers(root: str) -> list[int]:
    """Numbers of the slab files in a directory."""
    return sorted(
        int(name[5:-4])
        for name in os.listdir(root)
        if name.startswith("slab-") and name.endswith(".dat") and name[5:-4].isdigit()
    )
