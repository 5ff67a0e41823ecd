"""Writing blocks: which directory takes each, bytes first, then one sync, then the rows that make
them visible.

Directories of equal budgets get blocks round robin, so that the blocks of one prefix are read from
all of them at once (HCache section 4.2). With unequal budgets a larger directory has more turns,
spread evenly, so that all fill at the same time and evict blocks of the same age.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_hc.store.disk.backend import FULL, ThreadMemory, aligned_buffer
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.format import SlotHeader, make_table
from sglang_hc.store.disk.index import ROWS_PER_COMMIT
from sglang_hc.store.disk.index_file import IndexDamaged, IndexFull, NewRow, Place
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Block:
    """What names a block.

    block_id, parent_id: 16 bytes each (tree.identity). namespace: label for people, not identity.
    position: blocks before this one in its prefix. tokens: packed token ids, at most 256 bytes.
    """

    block_id: bytes
    parent_id: bytes
    namespace: str
    position: int
    tokens: bytes


@dataclass
class _Write:
    """One block of a batch, what became of it so far, and where it goes: a leased slot."""

    block: Block
    data: memoryview
    outcome: Outcome = Outcome.IO_ERROR
    location: tuple[Directory, Place] | None = None


class Dealer:
    """Deals blocks out over directories. Thread-safe.

    In any run of turns during which the same directories are usable, a directory's turns differ
    from its proportional part by less than the number of directories.
    """

    def __init__(self, directories: Sequence[Directory], slot_bytes: int) -> None:
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
        if first.free_slots():
            return [first, *others]
        free = {directory: directory.free_slots() for directory in others}
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


class BlockWriter:
    """Writes blocks of one model to its directories. Thread-safe."""

    def __init__(self, evictors: Mapping[Directory, Evictor], slot_bytes: int) -> None:
        self._evictors = evictors
        self.dealer = Dealer([*evictors], slot_bytes)
        self._lock = threading.Lock()
        self._under_way: set[bytes] = set()
        self._pages = ThreadMemory()
        self._publishing = threading.Lock()
        """Held over memory alone, never over a disk."""
        self.clearings = 0

    def clear(self) -> dict[Directory, dict[bytes, int]]:
        """As `Directory.forget` of all; what is being written now is not published any more."""
        with self._publishing:
            self.clearings += 1
            return {directory: directory.forget() for directory in self._evictors}

    def write_many(
        self, items: Sequence[tuple[Block, memoryview]], first: Directory | None, clearings: int
    ) -> list[Outcome]:
        """See `DiskStore.write_many`. clearings: as they were when the writes were asked for."""
        writes = [_Write(block, data) for block, data in items]
        for start in range(0, len(writes), ROWS_PER_COMMIT):
            self._write_batch(writes[start : start + ROWS_PER_COMMIT], first, clearings)
        return [write.outcome for write in writes]

    def _write_batch(
        self, batch: Sequence[_Write], first: Directory | None, clearings: int
    ) -> None:
        begun = [write for write in batch if self._begin(write)]
        written: dict[Directory, list[tuple[_Write, Place]]] = {}
        try:
            for number, write in enumerate(begun, start=1):
                more = len(begun) - number
                if first is None:
                    order = self.dealer.order()
                    more //= max(1, len(order))  # the others of the batch are dealt out too
                else:
                    order = [first, *(d for d in self._evictors if d is not first)]
                self._write_bytes(write, order, written, more)
            for directory, writes in written.items():
                self._publish(directory, writes, clearings)
        finally:
            for write in begun:
                self._end(write)

    def _begin(self, write: _Write) -> bool:
        """False for a block that is there, or that somebody else is writing."""
        block_id = write.block.block_id
        with self._lock:
            there = any(d.usable() and block_id in d.places for d in self._evictors)
            if there or block_id in self._under_way:
                write.outcome = Outcome.DUPLICATE
                return False
            self._under_way.add(block_id)
            return True

    def _end(self, write: _Write) -> None:
        _give_back(write)
        with self._lock:
            self._under_way.discard(write.block.block_id)

    def _write_bytes(
        self,
        write: _Write,
        order: Sequence[Directory],
        written: dict[Directory, list[tuple[_Write, Place]]],
        more: int,
    ) -> None:
        """Take a slot in the first of these directories that has one, and write header and chunks.

        written: of this batch, by directory; gets the block. It is to lie beside the one before it,
        and `more` blocks of the batch beside it.
        """
        for directory in filter(Directory.usable, order):
            behind = written[directory][-1][1] if directory in written else None
            try:
                place = self._evictors[directory].slot(behind, more)
                if place is None:
                    write.outcome = Outcome.NO_SPACE
                    continue
                write.location = directory, place
                directory.slabs.write(place, self._slot_content(directory, write))
                written.setdefault(directory, []).append((write, place))
                return
            except (OSError, IndexFull, IndexDamaged) as error:
                write.outcome = _failed(directory, error)
                _give_back(write)

    def _slot_content(self, directory: Directory, write: _Write) -> list[memoryview]:
        """Header and chunks. The header's memory is this thread's, until it asks again."""
        block, model = write.block, directory.model
        header = SlotHeader(
            block.block_id,
            block.parent_id,
            model.fingerprint,
            int(directory.clock() * 1e6),
            block.position,
            block.tokens,
            block.namespace,
            make_table(block.block_id, model.fingerprint, model.chunks, write.data),
        )
        page = self._pages.get(header.header_bytes)
        header.pack_into(page)
        return [page, write.data[: model.block_bytes]]

    def _publish(
        self, directory: Directory, writes: Sequence[tuple[_Write, Place]], clearings: int
    ) -> None:
        """Sync the bytes, commit the rows, and only then let lookups see the blocks, unless they
        were cleared meanwhile."""
        outcome = Outcome.OK
        try:
            directory.slabs.sync(place.slab for _, place in writes)
            with directory.guarded():
                rows = [_row(directory, write.block, place) for write, place in writes]
                replaced = directory.index.insert(rows)
            directory.slabs.release(replaced)
            placed = {w.block.block_id: place.pack() for w, place in writes}
            with self._publishing:
                cleared = clearings != self.clearings
                if not cleared:
                    directory.places.update(placed)
            if cleared:
                outcome = Outcome.DROPPED
                _blank(directory, writes)
                directory.delete_forgotten(placed)
            directory.io_succeeded()
        except (OSError, IndexFull, IndexDamaged) as error:
            outcome = _failed(directory, error)
        for write, _ in writes:
            write.outcome = outcome


def _blank(directory: Directory, writes: Sequence[tuple[_Write, Place]]) -> None:
    """Overwrite the headers of slots: what erases everything may have looked at them before."""
    zeros = aligned_buffer(directory.model.header_bytes)
    for _, place in writes:
        directory.slabs.write(place, [zeros])
    directory.slabs.sync(place.slab for _, place in writes)


def _give_back(write: _Write) -> None:
    """The slot of a write that is over, or that goes elsewhere."""
    if write.location is not None:
        directory, place = write.location
        if write.outcome is not Outcome.OK:
            directory.slabs.release([place])
        directory.slabs.unlease([place])
        write.location = None


def _row(directory: Directory, block: Block, place: Place) -> NewRow:
    created, accessed = int(directory.clock() * 1e6), directory.access_time(block.position)
    return NewRow(directory.number, block.block_id, block.namespace, *place, created, accessed)


def _failed(directory: Directory, error: Exception) -> Outcome:
    """The answer to writes that failed so; counted and logged."""
    if isinstance(error, IndexFull):
        directory.index_refused(error)
        return Outcome.NO_SPACE
    if isinstance(error, OSError):
        if error.errno in FULL:
            return Outcome.NO_SPACE
        logger.warning("%s: a block could not be written: %s", directory.root, error)
        directory.io_failed()
    return Outcome.IO_ERROR
