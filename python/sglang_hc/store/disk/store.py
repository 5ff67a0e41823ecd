"""The disk store: blocks of one model over one or several directories.

What `Catalog` answers, `expect` and `order` are for the scheduler thread: they look into memory,
never at a disk, and wait for nobody. Reads, writes and removals are for any number of I/O threads
at once. Nothing is believed that lies on a disk: every read proves identity and digests (HCache
section 4.2 for the layout, docs/disk-format.md for the bytes). Once open, trouble is an answer and
a counter, not an exception.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.disk.backend import Backend
from sglang_hc.store.disk.catalog import Catalog
from sglang_hc.store.disk.directory import (
    Directory,
    DirectoryFailed,
    DirectoryLost,
    DirectorySpec,
    StoredModel,
)
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.index_file import Place
from sglang_hc.store.disk.maintenance import Maintenance, Upkeep
from sglang_hc.store.disk.opening import Opening, open_directory
from sglang_hc.store.disk.reader import BlockReader, Read
from sglang_hc.store.disk.writer import Block, BlockWriter
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)

SlotBytes = memoryview | npt.NDArray[np.uint8]
"""One block's bytes as `forms.BlockLayout` lays them out, in page-aligned memory (O_DIRECT)."""

_DEFAULTS = Upkeep()


class DiskStore(Catalog):
    """See the module. Made by `open`; `close` it, so that the next start is quick."""

    def __init__(
        self,
        directories: Sequence[Directory],
        model: StoredModel,
        upkeep: Upkeep,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(directories, model, clock)
        self._evictor = Evictor(self, upkeep.watermarks)
        self._reader = BlockReader(self)
        self._writer = BlockWriter(self, self._evictor)
        self.maintenance = [Maintenance(self, d, self._evictor, upkeep) for d in directories]
        self.slot_bytes = model.slot_format.block_bytes
        """Bytes of one block, which is a slot of the host tier."""
        if upkeep.ttl_s is not None:
            for directory in directories:
                with suppress(DirectoryFailed):  # it is out of use then
                    self._evictor.expire(directory, clock() - upkeep.ttl_s)
            self.drain_removed()
        if upkeep.background:
            for one in self.maintenance:
                one.start()

    @classmethod
    def open(
        cls,
        directories: Sequence[DirectorySpec],
        model: StoredModel,
        upkeep: Upkeep = _DEFAULTS,
        backend: Backend | None = None,
        clock: Callable[[], float] = time.time,
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
            return cls(opened, model, upkeep, clock)
        except BaseException:
            for directory in opened:
                directory.close()
            raise

    # -- scheduler thread ---------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Blocks that fit into all directories."""
        size = self.model.slot_format.slot_bytes
        return sum(directory.slabs.data_bytes // size for directory in self.directories)

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """When waiting requests will use blocks, as far as that has changed since the last call: a
        rank, smaller is sooner, or None for no more. What is needed is evicted last, and of that
        what is needed last first. Blocks need not be here."""
        self._evictor.expect(uses)

    def order(self) -> list[Directory]:
        """The directories in use, in the order in which the next block should be offered to them:
        each in its turn, in proportion to its budget."""
        return self._writer.dealer.order()

    def counters(self) -> Counter[str]:
        """Sums since the store was opened."""
        return self.counted.snapshot()

    # -- I/O threads --------------------------------------------------------------------------

    def write_many(
        self, items: Sequence[tuple[Block, SlotBytes]], first: Directory | None = None
    ) -> list[Outcome]:
        """Store blocks; one answer per item. They are dealt over the directories, or go to `first`
        and to the others only where that one has no room or fails.

        Of every 32, those that go to one directory share a sync and a commit, and lie side by side
        where there is room. The bytes must not change meanwhile. Evicts when there is no room.
        After OK a block survives a power cut; before, no lookup sees it.
        """
        views = [(block, self._view(data)) for block, data in items]
        return self._writer.write_many(views, first)

    def write(self, block: Block, data: SlotBytes) -> Outcome:
        """Store one block. Prefer `write_many`."""
        return self.write_many([(block, data)])[0]

    def read_many(self, wanted: Sequence[tuple[bytes, SlotBytes, float | None]]) -> list[Outcome]:
        """Fetch blocks, each (identity, memory, deadline), and verify them; one answer each.

        Blocks that lie side by side are read by one call of up to 4 MiB. deadline: on
        `time.monotonic`, None for any time; checked between calls. A block that is damaged or
        cannot be read is removed, and its slot is not used again before a restart; the next lookup
        says no, unless another directory has the block too. A late block stays.
        """
        return self._reader.read_many(
            [Read(name, self._view(into), None, deadline) for name, into, deadline in wanted]
        )

    def read(
        self,
        block_id: bytes,
        into: SlotBytes,
        layers: Collection[int] | None = None,
        deadline: float | None = None,
    ) -> Outcome:
        """Fetch chunks of one block, as `read_many`. layers: which, all by default."""
        return self._reader.read_many([Read(block_id, self._view(into), layers, deadline)])[0]

    def clear(self) -> int:
        """Remove all blocks of this model, those in paused directories too; returns how many."""
        return sum(self.remove(list(d.places.copy()), [d]) for d in self.directories)

    def flush(self) -> None:
        """Write noted access times to the indexes."""
        for directory in self.in_use():
            self.flush_touches(directory)

    def tick(self) -> None:
        """One round of upkeep in every directory."""
        for one in self.maintenance:
            one.tick()

    def check_integrity(self) -> None:
        """Raises AssertionError when slots, leases and lookups disagree. For a quiet moment."""
        for directory in self.directories:
            slabs = directory.slabs
            assert slabs.leased() == 0, "leases without an operation"
            taken = {(n, s) for n, slots in slabs.taken_slots().items() for s in slots}
            mine = [Place.unpack(packed) for packed in directory.places.values()]
            assert len(mine) == len(set(mine)), "two blocks own one slot"
            owned = {(row.slab, row.slot) for row in directory.index.all_rows()}
            assert set(mine) <= owned, "a block without a row"
            assert owned <= taken, "a row whose slot is free"
            assert len(taken) == len(owned) + slabs.quarantined, "a taken slot without a row"

    def stop_upkeep(self) -> None:
        """End it for good, in the middle of what it is doing."""
        for one in self.maintenance:
            one.stop()

    def close(self) -> None:
        """Finish upkeep, write access times, close, unlock. No other call may be running."""
        self.stop_upkeep()
        self.flush()
        for directory in self.directories:
            directory.close()

    def _view(self, data: SlotBytes) -> memoryview:
        view = memoryview(data)  # type: ignore[arg-type]
        view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        if len(view) < self.slot_bytes:
            raise ValueError(f"{len(view)} bytes for a block of {self.slot_bytes}")
        if np.frombuffer(view, dtype=np.uint8).ctypes.data % CHUNK_ALIGN:
            raise ValueError("a block's memory must start at a page")
        return view


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
