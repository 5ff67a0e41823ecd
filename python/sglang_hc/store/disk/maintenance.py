"""What the store does on its own: access times to the index, expiry, watermarks, scrubbing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.disk.catalog import Catalog
from sglang_hc.store.disk.directory import Directory, DirectoryFailed
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.format import Damaged, check_slot
from sglang_hc.store.disk.index_file import IndexFull, Place, Row

logger = logging.getLogger(__name__)

TICK_S = 1.0
_SCRUB_ROWS = 256


@dataclass(frozen=True)
class Upkeep:
    """What is done without being asked.

    ttl_s: a block not used for that long is removed; None keeps it until its room is needed.
    scrub_bytes_per_s: pace of verifying stored blocks, shared by the directories; 0 for never.
    watermarks: (high, low) shares of a directory's slots. background: on threads of its own;
    otherwise whoever has the store calls `tick`.
    """

    ttl_s: float | None = None
    scrub_bytes_per_s: int = 16 << 20
    watermarks: tuple[float, float] = (0.95, 0.90)
    background: bool = True


class Scrubber:
    """Verifies all blocks of all models in a directory, round and round, in order of their
    places."""

    def __init__(self, blocks: Catalog, directory: Directory) -> None:
        self._blocks = blocks
        self._directory = directory
        self._work = self._rounds()

    def step(self, budget: int, stop: threading.Event) -> None:
        """Verify until `budget` bytes are read, a round ends or `stop` is set; a block that is
        damaged counts for one page at least."""
        done = 0
        while done < budget and not stop.is_set():
            read = next(self._work)
            if not read:
                break
            done += read
        self._blocks.counted.add("scrubbed_bytes", done)

    def close(self) -> None:
        """Give up the block that is being verified: its slot is leased."""
        self._work.close()

    def _rounds(self) -> Generator[int, None, None]:
        while True:
            try:
                yield from self._all_rows(self._directory)
            except (DirectoryFailed, IndexFull) as error:
                self._blocks.counted.add("maintenance_errors")
                logger.warning("%s: scrubbing put off: %s", self._directory.root, error)
            yield 0

    def _all_rows(self, directory: Directory) -> Iterator[int]:
        after = (-1, -1)
        while directory.usable():
            with directory.guarded():
                rows = directory.index.rows(after, _SCRUB_ROWS)
                fingerprints = {m.model: m.fingerprint for m in directory.index.models()}
            if not rows:
                return
            for row in rows:
                after = (row.slab, row.slot)
                fingerprint = fingerprints.get(row.model)
                if fingerprint is not None and directory.usable():
                    yield from self._check(directory, row, fingerprint)

    def _check(self, directory: Directory, row: Row, fingerprint: bytes) -> Iterator[int]:
        slot = Place(row.slab, row.slot)
        if not directory.slabs.lease(slot):
            return
        try:
            with directory.guarded():  # the row may have gone before the lease
                place = directory.index.place(row.model, row.block_id)
            if place != slot:
                return
            slot_bytes = directory.slabs.sizes().get(row.slab, 0)
            steps = check_slot(
                lambda buffers, offset: directory.slabs.read(slot, buffers, offset), slot_bytes
            )
            for header, read in steps:
                if (header.block_id, header.fingerprint) != (row.block_id, fingerprint):
                    raise Damaged("the slot holds another block")
                yield read
        except (Damaged, OSError) as problem:
            logger.warning("%s: scrub drops a block: %s", directory.root, problem)
            self._blocks.counted.add("scrub_damaged")
            if isinstance(problem, OSError):
                self._blocks.io_failed(directory)
            if self._remove(directory, fingerprint, row.block_id):
                directory.slabs.quarantine(slot)
            yield CHUNK_ALIGN
        finally:
            directory.slabs.unlease([slot])

    def _remove(self, directory: Directory, fingerprint: bytes, block_id: bytes) -> int:
        if fingerprint == self._blocks.model.fingerprint:
            return self._blocks.remove([block_id], [directory])
        return self._blocks.remove_rows(directory, fingerprint, [block_id])


class Maintenance:
    """Tends one directory, on a thread of its own once `start` was called: a directory that hangs
    holds up no other. The thread never dies of an error: it says so, counts it and goes on."""

    def __init__(
        self, blocks: Catalog, directory: Directory, evictor: Evictor, upkeep: Upkeep
    ) -> None:
        self._blocks = blocks
        self._directory = directory
        self._evictor = evictor
        self._ttl = upkeep.ttl_s
        self._pace = upkeep.scrub_bytes_per_s // len(blocks.directories)
        self._scrubber = Scrubber(blocks, directory)
        self._next_expiry = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hc-disk-maintenance", daemon=True)

    def start(self) -> None:
        """Begin to tick every TICK_S seconds."""
        self._thread.start()

    def stop(self) -> None:
        """Wait for the tick that runs now and end for good."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._scrubber.close()

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            self._tick_or_log()

    def _tick_or_log(self) -> None:
        try:
            self.tick()
        except Exception:
            self._blocks.counted.add("maintenance_errors")
            logger.exception("disk maintenance failed; trying again")

    def tick(self) -> None:
        """One round of everything that is due."""
        blocks, directory = self._blocks, self._directory
        if self._stop.is_set() or not directory.usable():
            return
        try:
            blocks.flush_touches(directory)
            blocks.retry_removals(directory)
            self._expire()
            self._evictor.trim(directory)
            self._evictor.prepare(directory)
        except (DirectoryFailed, IndexFull, OSError) as error:
            blocks.counted.add("maintenance_errors")
            logger.warning("%s: maintenance put off: %s", directory.root, error)
            if isinstance(error, OSError):
                blocks.io_failed(directory)
        if self._pace:
            self._scrubber.step(int(self._pace * TICK_S), self._stop)

    def _expire(self) -> None:
        now = self._blocks.clock()
        if self._ttl is not None and now >= self._next_expiry:
            self._next_expiry = now + min(60.0, self._ttl / 10)
            self._evictor.expire(self._directory, now - self._ttl)
