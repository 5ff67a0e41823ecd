"""The disk store: blocks of one model over one or several directories.

`contains`, `touch`, `expect` and `drain_removed` are for the scheduler thread: they look into
memory, never at a disk, and wait for nobody. `write_many`, `write`, `read` and `delete` are for any
number of I/O threads at once. Nothing is believed that lies on a disk: every read proves identity
and digests (HCache section 4.2 for the layout, docs/disk-format.md for the bytes). Once open,
trouble is an answer and a counter, not an exception.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.disk.backend import Backend
from sglang_hc.store.disk.catalog import Catalog
from sglang_hc.store.disk.directory import Directory, DirectoryFailed, DirectoryLost, DirectorySpec
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.format import ID_BYTES, Chunk, SlotFormat
from sglang_hc.store.disk.maintenance import Maintenance
from sglang_hc.store.disk.opening import Opening, open_directory
from sglang_hc.store.disk.reader import BlockReader
from sglang_hc.store.disk.schema import Place
from sglang_hc.store.disk.writer import Block, BlockWriter
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)

SlotBytes = memoryview | npt.NDArray[np.uint8]
"""One block's bytes as `forms.BlockLayout` lays them out, in page-aligned memory (O_DIRECT)."""

HIGH_WATERMARK = 0.95
LOW_WATERMARK = 0.90
SCRUB_BYTES_PER_S = 16 << 20


class DiskStore:
    """See the module. Made by `open`; `close` it, so that the next start is quick."""

    def __init__(self, blocks: Catalog, evictor: Evictor, maintenance: Maintenance) -> None:
        self._blocks = blocks
        self._reader = BlockReader(blocks)
        self._writer = BlockWriter(blocks, evictor)
        self._evictor = evictor
        self.maintenance = maintenance
        self.slot_bytes = blocks.slot_format.block_bytes
        """Bytes of one block, which is a slot of the host tier."""

    @classmethod
    def open(
        cls,
        directories: Sequence[DirectorySpec],
        layout_chunks: Sequence[tuple[int, int, int]],
        fingerprint: bytes,
        model_label: str,
        *,
        ttl_s: float | None = None,
        watermarks: tuple[float, float] = (HIGH_WATERMARK, LOW_WATERMARK),
        scrub_bytes_per_s: int = SCRUB_BYTES_PER_S,
        background: bool = True,
        backend: Backend | None = None,
        clock: Callable[[], float] = time.time,
    ) -> DiskStore:
        """Open, and make where missing, the directories for one model.

        layout_chunks: (layer, offset, length) of `BlockLayout.chunks()`. fingerprint: 16 bytes of
        `BlockLayout.fingerprint`. model_label: for people. watermarks: (high, low) shares of a
        directory's slots. background: run maintenance on a thread of its own; otherwise call
        `maintenance.tick`. backend: None for the real disk. A directory whose device fails is left
        out, unless all fail. Raises DirectoryError with a message for users; nothing stays open or
        locked then.
        """
        if len(fingerprint) != ID_BYTES:
            raise ValueError(f"fingerprint of {len(fingerprint)} bytes; {ID_BYTES} are needed")
        slot_format = SlotFormat(tuple(Chunk(*chunk) for chunk in layout_chunks))
        opened: list[Directory] = []
        try:
            for spec in directories:
                opening = Opening(spec, slot_format, fingerprint, model_label, backend, clock)
                opened += _open_unless_lost(opening, last=not opened and spec is directories[-1])
            blocks = Catalog(opened, slot_format, fingerprint, clock)
            evictor = Evictor(blocks, *watermarks)
            maintenance = Maintenance(blocks, evictor, ttl_s, scrub_bytes_per_s)
            if ttl_s is not None:
                for directory in opened:
                    with suppress(DirectoryFailed):  # it is out of use then
                        evictor.expire(directory, clock() - ttl_s)
                blocks.removed.clear()
        except BaseException:
            for directory in opened:
                directory.close()
            raise
        if background:
            maintenance.start()
        return cls(blocks, evictor, maintenance)

    # -- scheduler thread ---------------------------------------------------------------------

    def contains(self, block_ids: Sequence[bytes]) -> int:
        """How many of the first identities are here without a gap. A block in a directory that is
        out of use is not here. A yes is no promise: the read proves it."""
        return self._blocks.leading(block_ids)

    @property
    def directories(self) -> int:
        """How many directories there are."""
        return len(self._blocks.directories)

    def directories_in_use(self) -> int:
        """How many directories may be asked now: neither failed nor paused because of failures."""
        return len(self._blocks.in_use())

    @property
    def capacity(self) -> int:
        """Blocks that fit into all directories."""
        size = self._blocks.slot_format.slot_bytes
        return sum(d.slabs.data_bytes // size for d in self._blocks.directories)

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """Note that a prefix path was used, wherever it was served from; identities in path order.
        Blocks that are not here are ignored. The sequence must not change afterwards."""
        self._blocks.touch(block_ids)

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """When waiting requests will use blocks, as far as that has changed since the last call: a
        rank, smaller is sooner, or None for no more. What is needed is evicted last, and of that
        what is needed last first. Blocks need not be here."""
        self._evictor.expect(uses)

    def drain_removed(self) -> list[bytes]:
        """Identities of blocks that left since the last call: evicted, expired, deleted, damaged.
        For whoever mirrors what is on disk; a block may have been written again meanwhile."""
        removed = []
        while self._blocks.removed:
            removed.append(self._blocks.removed.popleft())
        return removed

    def take_directory_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(identities in directories that are in use again, identities in those that went out of
        use), each since the last call. For whoever mirrors what is on disk."""
        return self._blocks.take_changes()

    def counters(self) -> dict[str, int]:
        """Sums since the store was opened (counters.Counters)."""
        return self._blocks.counters.snapshot()

    def __len__(self) -> int:
        """Blocks here."""
        return len(self._blocks)

    def block_ids(self) -> list[bytes]:
        """Identities of all blocks here, for whoever mirrors them from the start."""
        return self._blocks.ids()

    # -- I/O threads --------------------------------------------------------------------------

    def write_many(self, items: Sequence[tuple[Block, SlotBytes]]) -> list[Outcome]:
        """Store blocks, dealt over the directories; one answer per item.

        Of every 32, those that go to one directory share a sync and a commit. The bytes must not
        change meanwhile. Evicts when there is no room. After OK a block survives a power cut;
        before, no lookup sees it.
        """
        views = [(block, self._view(data)) for block, data in items]
        return self._writer.write_many(views)

    def write(self, block: Block, data: SlotBytes) -> Outcome:
        """Store one block. Prefer `write_many`."""
        return self.write_many([(block, data)])[0]

    def read(
        self,
        block_id: bytes,
        into: SlotBytes,
        layers: Collection[int] | None = None,
        deadline: float | None = None,
    ) -> Outcome:
        """Fetch chunks of a block to their places in `into` and verify them.

        layers: which, all by default. deadline: on `time.monotonic`; checked between pieces of at
        most 4 MiB or one chunk, so a call outlives it by one piece. A block that is damaged or
        cannot be read is removed, and its slot is not used again before a restart; the next lookup
        says no, unless another directory has the block too. A late block stays.
        """
        return self._reader.read(block_id, self._view(into), layers, deadline)

    def delete(self, block_ids: Sequence[bytes]) -> int:
        """Remove blocks; returns how many were here. Their bytes stay until the slot is reused."""
        count = self._blocks.remove(block_ids)
        self._blocks.counters.add("deleted_blocks", count)
        return count

    def clear(self) -> int:
        """Remove all blocks of this model, those in paused directories too; returns how many."""
        count = 0
        for directory in self._blocks.directories:
            count += self._blocks.remove(list(directory.places.copy()), [directory])
        self._blocks.counters.add("deleted_blocks", count)
        return count

    def flush(self) -> None:
        """Write noted access times to the index."""
        self._blocks.flush_touches()

    def check_integrity(self) -> None:
        """Raises AssertionError when slots, leases and lookups disagree. For a quiet moment."""
        for directory in self._blocks.directories:
            slabs = directory.slabs
            assert slabs.leased() == 0, "leases without an operation"
            taken = {(n, s) for n, slots in slabs.taken_slots().items() for s in slots}
            mine = [Place.unpack(packed) for packed in directory.places.values()]
            assert len(mine) == len(set(mine)), "two blocks own one slot"
            owned = {(row.slab, row.slot) for row in directory.index.all_rows()}
            assert set(mine) <= owned, "a block without a row"
            assert owned <= taken, "a row whose slot is free"
            assert len(taken) == len(owned) + slabs.quarantined, "a taken slot without a row"

    def close(self) -> None:
        """Finish maintenance, write access times, close, unlock. No other call may be running."""
        self.maintenance.stop()
        self._blocks.flush_touches()
        for directory in self._blocks.directories:
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
