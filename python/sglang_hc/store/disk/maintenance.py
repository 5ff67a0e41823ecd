"""What the store does on its own: access times to the index, expiry, watermarks, scrubbing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.disk.catalog import Catalog
from sglang_hc.store.disk.checksums import Damaged, check_slot
from sglang_hc.store.disk.directory import Directory, DirectoryFailed
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.schema import IndexFull, Place, Row

logger = logging.getLogger(__name__)

TICK_S = 1.0
_SCRUB_ROWS = 256


class Scrubber:
    """Verifies all blocks of all models, round and round, in order of their places."""

    def __init__(self, blocks: Catalog) -> None:
        self._blocks = blocks
        self._work = self._rounds()

    def step(self, budget: int, stop: threading.Event) -> int:
        """Verify until `budget` bytes are read, a round ends or `stop` is set. Returns the bytes
        read; a block that is damaged counts for one page at least."""
        done = 0
        while done < budget and not stop.is_set():
            read = next(self._work)
            if not read:
                break
            done += read
        self._blocks.counters.add("scrubbed_bytes", done)
        return done

    def close(self) -> None:
        """Give up the block that is being verified: its slot is leased."""
        self._work.close()

    def _rounds(self) -> Generator[int, None, None]:
        while True:
            for directory in self._blocks.directories:
                yield from self._round(directory)
            yield 0

    def _round(self, directory: Directory) -> Iterator[int]:
        try:
            yield from self._all_rows(directory)
        except (DirectoryFailed, IndexFull) as error:
            self._blocks.counters.add("maintenance_errors")
            logger.warning("%s: the scrubber goes on elsewhere: %s", directory.root, error)

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
            self._blocks.counters.add("scrub_damaged")
            if isinstance(problem, OSError):
                self._blocks.io_failed(directory)
            if self._remove(directory, fingerprint, row.block_id):
                directory.slabs.quarantine(slot)
            yield CHUNK_ALIGN
        finally:
            directory.slabs.unlease([slot])

    def _remove(self, directory: Directory, fingerprint: bytes, block_id: bytes) -> int:
        if fingerprint == self._blocks.fingerprint:
            return self._blocks.remove([block_id], [directory])
        return self._blocks.remove_rows(directory, fingerprint, [block_id])


class Maintenance:
    """One background thread that never dies of an error: it says so, counts it and goes on.

    ttl_s: a block not used for that long is removed; None keeps it until its room is needed.
    scrub_bytes_per_s: pace of the scrubber; 0 turns it off.
    """

    def __init__(
        self, blocks: Catalog, evictor: Evictor, ttl_s: float | None, scrub_bytes_per_s: int
    ) -> None:
        self._blocks = blocks
        self._evictor = evictor
        self._ttl = ttl_s
        self._pace = scrub_bytes_per_s
        self._scrubber = Scrubber(blocks)
        self._next_expiry = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to tick every TICK_S seconds."""
        self._thread = threading.Thread(target=self._run, name="hc-disk-maintenance", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the tick that runs now and end for good."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._scrubber.close()

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            self._tick_or_log()

    def _tick_or_log(self) -> None:
        try:
            self.tick()
        except Exception:
            self._blocks.counters.add("maintenance_errors")
            logger.exception("disk maintenance failed; trying again")

    def tick(self) -> None:
        """One round of everything that is due. A directory that fails keeps no other waiting."""
        blocks = self._blocks
        blocks.flush_touches()
        oldest = self._oldest_kept()
        for directory in blocks.in_use():
            self._tend(directory, oldest)
        if self._pace and not self._stop.is_set():
            self._scrubber.step(int(self._pace * TICK_S), self._stop)

    def _tend(self, directory: Directory, oldest: float | None) -> None:
        blocks = self._blocks
        try:
            blocks.retry_removals(directory)
            if oldest is not None:
                self._evictor.expire(directory, oldest)
            self._evictor.trim(directory)
            self._evictor.prepare(directory)
        except (DirectoryFailed, IndexFull, OSError) as error:
            blocks.counters.add("maintenance_errors")
            logger.warning("%s: maintenance put off: %s", directory.root, error)
            if isinstance(error, OSError):
                blocks.io_failed(directory)

    def _oldest_kept(self) -> float | None:
        """Blocks last used before this time expire now; None when it is not time to look."""
        now = self._blocks.clock()
        if self._ttl is None or now < self._next_expiry:
            return None
        self._next_expiry = now + min(60.0, self._ttl / 10)
        return now - self._ttl
