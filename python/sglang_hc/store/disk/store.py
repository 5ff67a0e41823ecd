"""The disk store: blocks of one model over one or several directories.

A block lies whole in one directory. A directory that failed, or whose I/O keeps failing, is out of
use: its blocks are not found, and the other directories go on.

Lookups, `touch`, `expect` and `order` are for the scheduler thread: they look into memory, never at
a disk, and wait for nobody. Reads, writes and removals are for any number of I/O threads at once.
Nothing is believed that lies on a disk: every read proves identity and digests (HCache section 4.2
for the layout, docs/disk-format.md for the bytes). Once open, trouble is an answer and a counter,
not an exception.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile

import numpy as np

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.disk import erasing
from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.disk.directory import (
    Directory,
    DirectoryLost,
    DirectorySpec,
    steady_time,
)
from sglang_hc.store.disk.erasing import Erased
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.format import StoredModel
from sglang_hc.store.disk.index_file import IndexDamaged, IndexFull, Place
from sglang_hc.store.disk.maintenance import Maintenance, Upkeep
from sglang_hc.store.disk.opening import Opening, open_directory
from sglang_hc.store.disk.reader import BlockReader, Read
from sglang_hc.store.disk.writer import Block, BlockWriter
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting

logger = logging.getLogger(__name__)

_DEFAULTS = Upkeep()


class DiskStore:
    """See the module. Made by `open`; `close` it, so that the next start is quick."""

    def __init__(
        self,
        directories: Sequence[Directory],
        model: StoredModel,
        upkeep: Upkeep,
        left_out: int = 0,
    ) -> None:
        """left_out: further directories whose devices fail."""
        self.directories = tuple(directories)
        self._left_out = left_out
        self.model = model
        self.slot_bytes = model.block_bytes
        """Bytes of one block, which is a slot of the host tier."""
        self._uses: dict[bytes, float] = {}
        evictors = {d: Evictor(d, self._uses) for d in directories}
        self._readers = {directory: BlockReader(directory) for directory in directories}
        self._writer = BlockWriter(evictors, model.slot_bytes)
        share = 1 / len(directories)
        self.maintenance = [Maintenance(d, evictors[d], upkeep, share) for d in directories]
        self._in_use_before = set(directories)
        for one in self.maintenance:
            with suppress(IndexDamaged, IndexFull):  # it is out of use then, or tries again
                one.expire()
            if upkeep.background:
                one.start()

    @classmethod
    def open(
        cls,
        directories: Sequence[DirectorySpec],
        model: StoredModel,
        upkeep: Upkeep = _DEFAULTS,
        backend: DirectBackend | None = None,
        clock: Callable[[], float] = steady_time,
    ) -> DiskStore:
        """Open, and make where missing, the directories for one model.

        backend: None for the real disk. A directory whose device fails is left out, unless all
        fail. Raises DirectoryError with a message for users; nothing stays open or locked then.
        """
        opened: list[Directory] = []
        try:
            for spec in directories:
                opening = Opening(spec, model, backend, clock)
                opened += _open_unless_lost(opening, last=not opened and spec is directories[-1])
            return cls(opened, model, upkeep, len(directories) - len(opened))
        except BaseException:
            for directory in opened:
                directory.close()
            raise

    # -- scheduler thread ---------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Blocks that fit into all directories."""
        size = self.model.slot_bytes
        return sum(directory.slabs.data_bytes // size for directory in self.directories)

    def in_use(self) -> list[Directory]:
        """The directories that may be asked now: neither failed nor paused because of failures."""
        return [directory for directory in self.directories if directory.usable()]

    def contains(self, block_ids: Sequence[bytes]) -> int:
        """How many of the first identities are here without a gap. A block in a directory that is
        out of use is not here. A yes is no promise: the read proves it."""
        known = [directory.places for directory in self.in_use()]
        if len(known) == 1:
            return len(list(takewhile(known[0].__contains__, block_ids)))
        for count, block_id in enumerate(block_ids):
            for places in known:
                if block_id in places:
                    break
            else:
                return count
        return len(block_ids)

    def directory_of(self, block_id: bytes) -> Directory | None:
        """The directory in use that has this block; None when none has."""
        for directory in self.directories:
            if block_id in directory.places and directory.usable():
                return directory
        return None

    def absence(self, block_id: bytes) -> Outcome:
        """The answer to a read of a block that `directory_of` does not find."""
        out = any(block_id in d.places for d in self.directories if not d.usable())
        return Outcome.IO_ERROR if out else Outcome.MISSING

    def __len__(self) -> int:
        return sum(len(directory.places) for directory in self.in_use())

    def block_ids(self) -> list[bytes]:
        """Identities of all blocks here, for whoever mirrors them from the start. One that lies in
        two directories is named twice."""
        return [name for directory in self.in_use() for name in directory.places.copy()]

    def drain_removed(self) -> list[bytes]:
        """Identities of blocks that left since the last call: evicted, expired, deleted, damaged.
        For whoever mirrors what is on disk; a block may have been written again meanwhile. Nothing
        is noted before the first call."""
        return [name for directory in self.directories for name in directory.take_removed()]

    def take_directory_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(identities in directories that are in use again, identities in those that went out of
        use), each since the last call. For one caller, who mirrors what can be read."""
        now = set(self.in_use())
        before, self._in_use_before = self._in_use_before, now
        back = [name for directory in now - before for name in directory.places.copy()]
        lost = [name for directory in before - now for name in directory.places.copy()]
        return back, lost

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """Note that a prefix path was used, wherever it was served from; identities in path order,
        so that a block never looks younger than its parent. Blocks that are not here are ignored.
        The sequence must not change afterwards.

        Costs one append for each directory in use; upkeep writes it to the indexes.
        """
        for directory in self.in_use():
            directory.touch(block_ids)

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """When waiting requests will use blocks, as far as that has changed since the last call: a
        rank, smaller is sooner, or None for no more. What is needed is evicted last, and of that
        what is needed last first. Blocks need not be here."""
        for block_id, use in uses.items():
            if use is None:
                self._uses.pop(block_id, None)
            else:
                self._uses[block_id] = use

    def order(self) -> list[Directory]:
        """The directories in use, in the order in which the next block should be offered to them:
        each in its turn, in proportion to its budget."""
        return self._writer.dealer.order()

    def counters(self) -> Counter[str]:
        """What no answer tells: sums since the store was opened."""
        return sum((directory.counters() for directory in self.directories), Counter())

    # -- I/O threads --------------------------------------------------------------------------

    @property
    def clearings(self) -> int:
        """How often the store was cleared."""
        return self._writer.clearings

    def write_many(
        self,
        items: Sequence[tuple[Block, memoryview]],
        first: Directory | None = None,
        clearings: int | None = None,
    ) -> list[Outcome]:
        """Store blocks with their bytes, as `forms.BlockLayout` lays them out in page-aligned
        memory (O_DIRECT); one answer per item. They are dealt over the directories, or go to
        `first` and to the others only where that one has no room or fails.

        Of every 32, those that go to one directory share a sync and a commit, and lie side by side
        where there is room. The bytes must not change meanwhile. Evicts when there is no room.
        After OK a block survives a power cut; before, no lookup sees it. clearings: as they were
        when the blocks were handed over, None for now; those that are cleared are DROPPED.
        """
        for _, data in items:
            self._check(data)
        now = self.clearings if clearings is None else clearings
        return self._writer.write_many(items, first, now)

    def read_many(self, reads: Sequence[Read]) -> list[Outcome]:
        """Fetch blocks, or some layers of them, and verify them; one answer each.

        Blocks that lie side by side are read by one call of up to 4 MiB. A block that is damaged or
        cannot be read is removed, and its slot is not used again before a restart; the next lookup
        says no, unless another directory has the block too. A late block stays.
        """
        by_directory: dict[Directory | None, list[Read]] = {}
        for read in reads:
            self._check(read.into)
            by_directory.setdefault(self.directory_of(read.block_id), []).append(read)
        absent = by_directory.pop(None, [])
        outcomes = {read: self.absence(read.block_id) for read in absent}
        for directory, some in by_directory.items():
            assert directory is not None
            outcomes |= self._readers[directory].read_many(some)
        return [outcomes[read] for read in reads]

    def forget_all(self) -> dict[Directory, dict[bytes, int]]:
        """As `Directory.forget`, of all: the first half of `erase_all`. Waits for no disk."""
        return self._writer.clear()

    def erase_all(self, forgotten: Mapping[Directory, Mapping[bytes, int]]) -> Erased:
        """Erase the blocks that `forget_all` gave, those in paused directories too. Gone for good
        when this returns, and says so, whatever happens to process, index or power."""
        blocks, complete = erasing.clear(forgotten)
        return Erased(blocks, complete and not self._left_out)

    def erase(self, what: Forgetting | None) -> Erased:
        """As `erase_all`, the blocks of some namespaces, of every model, or every block of this one
        for None. No block of these may be waiting to be written."""
        if what is None:
            return self.erase_all(self.forget_all())
        blocks, complete = erasing.forget(self.directories, what)
        return Erased(blocks, complete and not self._left_out)

    def tick(self) -> None:
        """One round of upkeep in every directory."""
        for one in self.maintenance:
            one.tick()

    def check_integrity(self) -> None:
        """Raises AssertionError when slots, leases and lookups disagree. For a quiet moment."""
        for directory in self.directories:
            mine = [Place.unpack(packed) for packed in directory.places.values()]
            assert len(mine) == len(set(mine)), "two blocks own one slot"
            owned = [row.place for row in directory.index.all_rows()]
            assert set(mine) <= set(owned), "a block without a row"
            directory.slabs.check(owned)

    def stop_upkeep(self) -> None:
        """End it for good, in the middle of what it is doing."""
        for one in self.maintenance:
            one.stop()

    def close(self) -> None:
        """Finish upkeep, write access times, close, unlock. No other call may be running."""
        self.stop_upkeep()
        for directory in self.directories:
            self.close_directory(directory)

    def close_directory(self, directory: Directory) -> None:
        """As `close`, of one: a directory that hangs does not come back from here."""
        self.maintenance[self.directories.index(directory)].stop()
        if directory.usable():
            directory.flush_touches()
        directory.close()

    def _check(self, data: memoryview) -> None:
        if data.format != "B" or len(data) < self.slot_bytes:
            raise ValueError(f"{data.nbytes} bytes for a block of {self.slot_bytes}")
        if np.frombuffer(data, dtype=np.uint8).ctypes.data % CHUNK_ALIGN:
            raise ValueError("a block's memory must start at a page")


def _open_unless_lost(opening: Opening, last: bool) -> list[Directory]:
    """The directory, if its device works. last: there is no other one, so that the error is raised.
    Raises DirectoryError."""
    try:
        return [open_directory(opening)]
    except DirectoryLost as error:
        if last:
            raise
        logger.error("%s. The other directories are used without it", error)
        return []
