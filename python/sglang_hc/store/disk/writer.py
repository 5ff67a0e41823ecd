"""Writing blocks: which directory takes each, bytes first, then one sync, then the rows that make
them visible.

Directories of equal budgets get blocks round robin, so that the blocks of one prefix are read from
all of them at once (HCache section 4.2). With unequal budgets a larger directory has more turns,
spread evenly, so that all fill at the same time and evict blocks of the same age.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_hc.store.disk.backend import ThreadMemory
from sglang_hc.store.disk.catalog import Catalog, Location
from sglang_hc.store.disk.directory import Directory, DirectoryFailed
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.format import SlotHeader, clip_label, make_table
from sglang_hc.store.disk.index import ROWS_PER_COMMIT
from sglang_hc.store.disk.index_file import IndexFull, Place, Row
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
    """One block of a batch: where it goes, and what became of it so far."""

    block: Block
    data: memoryview
    outcome: Outcome = Outcome.IO_ERROR
    location: Location | None = None
    published: bool = False


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


class BlockWriter:
    """Writes blocks of one catalog. Thread-safe."""

    def __init__(self, blocks: Catalog, evictor: Evictor) -> None:
        self._blocks = blocks
        self._evictor = evictor
        self._format = blocks.model.slot_format
        self.dealer = Dealer(blocks.directories, self._format.slot_bytes)
        self._lock = threading.Lock()
        self._under_way: set[bytes] = set()
        self._pages = ThreadMemory()

    def write_many(
        self, items: Sequence[tuple[Block, memoryview]], first: Directory | None
    ) -> list[Outcome]:
        """See DiskStore.write_many."""
        outcomes: list[Outcome] = []
        for start in range(0, len(items), ROWS_PER_COMMIT):
            batch = [_Write(*item) for item in items[start : start + ROWS_PER_COMMIT]]
            self._write_batch(batch, first)
            outcomes += [write.outcome for write in batch]
        for outcome in outcomes:
            name = "written_blocks" if outcome is Outcome.OK else f"write_{outcome.value}"
            self._blocks.counted.add(name)
        return outcomes

    def _write_batch(self, batch: Sequence[_Write], first: Directory | None) -> None:
        begun: list[_Write] = []
        last: dict[Directory, Place] = {}
        """Where the last block of this batch went, so that the next one lies beside it."""
        try:
            for number, write in enumerate(batch, start=1):
                if self._begin(write.block.block_id):
                    begun.append(write)
                    order = self._order(first)
                    more = len(batch) - number
                    if first is None:  # the others of the batch are dealt out too
                        more //= max(1, len(order))
                    self._write_bytes(write, order, last, more)
                else:
                    write.outcome = Outcome.DUPLICATE
            for directory in self._blocks.directories:
                self._publish(directory, _written_to(directory, begun))
        finally:
            for write in begun:
                self._end(write)

    def _begin(self, block_id: bytes) -> bool:
        with self._lock:
            if block_id in self._under_way or self._blocks.directory_of(block_id):
                return False
            self._under_way.add(block_id)
            return True

    def _end(self, write: _Write) -> None:
        if write.location is not None:
            directory, place = write.location
            if not write.published:
                directory.slabs.release([place])
            directory.slabs.unlease([place])
        with self._lock:
            self._under_way.discard(write.block.block_id)

    def _order(self, first: Directory | None) -> list[Directory]:
        """The directories to try, one after the other."""
        if first is None:
            return self.dealer.order()
        return sorted(self._blocks.in_use(), key=lambda directory: directory is not first)

    def _write_bytes(
        self, write: _Write, order: Sequence[Directory], last: dict[Directory, Place], more: int
    ) -> None:
        """Take a slot and write header and chunks. The outcome is OK if the bytes were written.

        more: blocks of the batch that will go to the same directory.
        """
        write.outcome = Outcome.IO_ERROR
        for directory in order:
            try:
                place = self._evictor.slot(directory, last.get(directory), more)
                if place is None:
                    write.outcome = Outcome.NO_SPACE
                    continue
                write.location = Location(directory, place)
                last[directory] = place
                directory.slabs.write(place, self._slot_content(write))
                write.outcome = Outcome.OK
            except OSError as error:
                write.outcome = self._failed(directory, error)
            except DirectoryFailed:
                continue
            return

    def _slot_content(self, write: _Write) -> list[memoryview]:
        """Header and chunks. The header's memory is this thread's, until it asks again."""
        block, blocks = write.block, self._blocks
        header = SlotHeader(
            block.block_id,
            block.parent_id,
            blocks.model.fingerprint,
            int(blocks.clock() * 1e6),
            block.position,
            block.tokens,
            block.namespace,
            make_table(block.block_id, blocks.model.fingerprint, self._format.chunks, write.data),
        )
        page = self._pages.get(header.header_bytes)
        header.pack_into(page)
        return [page, write.data[: self._format.block_bytes]]

    def _failed(self, directory: Directory, error: OSError) -> Outcome:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Outcome.NO_SPACE
        logger.warning("%s: a block could not be written: %s", directory.root, error)
        self._blocks.io_failed(directory)
        return Outcome.IO_ERROR

    def _publish(self, directory: Directory, writes: Sequence[_Write]) -> None:
        """Sync the bytes, commit the rows, and only then let lookups see the blocks."""
        if not writes:
            return
        for write in writes:
            write.outcome = Outcome.IO_ERROR  # until the rows are committed
        places = [write.location.place for write in writes if write.location is not None]
        try:
            directory.slabs.sync(place.slab for place in places)
            with directory.guarded():
                rows = [self._row(directory, write) for write in writes]
                replaced = directory.index.insert(rows)
            directory.slabs.release(replaced)
        except (OSError, IndexFull, DirectoryFailed) as error:
            outcome = self._not_published(directory, error)
            for write in writes:
                write.outcome = outcome
            return
        for write, place in zip(writes, places, strict=True):
            directory.places[write.block.block_id] = place.pack()
            write.outcome, write.published = Outcome.OK, True
        self._blocks.io_succeeded(directory)

    def _not_published(self, directory: Directory, error: Exception) -> Outcome:
        if isinstance(error, OSError):
            return self._failed(directory, error)
        if isinstance(error, IndexFull):
            logger.warning("%s: the index takes no more blocks: %s", directory.root, error)
            self._blocks.counted.add("index_refused")
            return Outcome.NO_SPACE
        return Outcome.IO_ERROR

    def _row(self, directory: Directory, write: _Write) -> Row:
        assert write.location is not None
        block, place = write.block, write.location.place
        return Row(
            directory.model,
            block.block_id,
            directory.namespace(clip_label(block.namespace)),
            place.slab,
            place.slot,
            int(self._blocks.clock() * 1e6),
            self._blocks.access_time(block.position),
            0,
        )


def _written_to(directory: Directory, writes: Iterable[_Write]) -> list[_Write]:
    return [
        write
        for write in writes
        if write.outcome is Outcome.OK
        and write.location is not None
        and write.location.directory is directory
    ]
