"""What the store does on its own: access times to the index, expiry, watermarks, scrubbing."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.format import Damaged, check_slot
from sglang_hc.store.disk.index_file import IndexDamaged, IndexFull, Row

logger = logging.getLogger(__name__)

TICK_S = 1.0
_SCRUB_ROWS = 256
_FIRST = (-1, -1)


@dataclass(frozen=True)
class Upkeep:
    """What is done without being asked.

    ttl_s: a block not used for that long is removed; None keeps it until its room is needed.
    scrub_bytes_per_s: pace of verifying stored blocks, shared by the directories; 0 for never.
    background: on threads of its own; otherwise whoever has the store calls `tick`.
    """

    ttl_s: float | None = None
    scrub_bytes_per_s: int = 16 << 20
    background: bool = True


class Scrubber:
    """Verifies all blocks of all models in a directory, round and round, in order of their
    places."""

    def __init__(self, directory: Directory, stop: threading.Event) -> None:
        self._directory = directory
        self._stop = stop
        self._after = _FIRST
        self._credit = 0

    def step(self, budget: int) -> None:
        """Verify blocks until `budget` bytes are read, a round ends or `stop` is set. What the last
        block took beyond the budget is taken from the next steps. A block that is damaged counts
        for one page at least. Raises IndexDamaged, IndexFull."""
        directory = self._directory
        self._credit = min(self._credit, 0) + budget
        while self._credit > 0:
            with directory.guarded():
                rows = directory.index.rows(self._after, _SCRUB_ROWS)
                fingerprints = {m.model: m.fingerprint for m in directory.index.models()}
            for row in rows:
                if self._credit <= 0 or self._stop.is_set() or not directory.usable():
                    return
                self._after = (row.slab, row.slot)
                read = self._check(row, fingerprints.get(row.model))
                self._credit -= read
                directory.count("scrubbed_bytes", read)
            if not rows:
                self._after = _FIRST
                return

    def _check(self, row: Row, fingerprint: bytes | None) -> int:
        """Verify one block; remove it if it is damaged. Returns the bytes that this took."""
        directory, place = self._directory, row.place
        if not directory.slabs.lease(place):
            return 0
        try:
            with directory.guarded():  # the row may have gone before the lease
                if directory.index.place(row.model, row.block_id) != place:
                    return 0
            size = directory.slabs.sizes().get(row.slab, 0)
            read = partial(directory.slabs.read, place)
            check_slot(read, size, (row.block_id, fingerprint))
            return size
        except (Damaged, OSError) as problem:
            logger.warning("%s: scrub drops a block: %s", directory.root, problem)
            directory.count("scrub_damaged")
            if isinstance(problem, OSError):
                directory.io_failed()
            directory.drop_damaged(row)
            return CHUNK_ALIGN
        finally:
            directory.slabs.unlease([place])


class Maintenance:
    """Tends one directory, on a thread of its own once `start` was called: a directory that hangs
    holds up no other. The thread never dies of an error: it says so, counts it and goes on.

    share: this directory's part of the pace of scrubbing.
    """

    def __init__(
        self, directory: Directory, evictor: Evictor, upkeep: Upkeep, share: float
    ) -> None:
        self._directory = directory
        self._evictor = evictor
        self._ttl = upkeep.ttl_s
        self._budget = int(upkeep.scrub_bytes_per_s * share * TICK_S)
        self._next_expiry = 0.0
        self._stop = threading.Event()
        self._scrubber = Scrubber(directory, self._stop)
        self._thread = threading.Thread(target=self._run, name="hc-disk-maintenance", daemon=True)

    def start(self) -> None:
        """Begin to tick every TICK_S seconds."""
        self._thread.start()

    def stop(self) -> None:
        """Wait for the tick that runs now and end for good."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            self._tick_or_log()

    def _tick_or_log(self) -> None:
        try:
            self.tick()
        except Exception:
            self._directory.count("maintenance_errors")
            logger.exception("disk maintenance failed; trying again")

    def tick(self) -> None:
        """One round of everything that is due."""
        directory = self._directory
        if self._stop.is_set() or not directory.usable():
            return
        try:
            directory.flush_touches()
            directory.retry_removals()
            self.expire()
            self._evictor.trim()
            with directory.guarded():
                directory.slabs.prepare(directory.model.slot_bytes)
            self._scrubber.step(self._budget)
        except (IndexDamaged, IndexFull, OSError) as error:
            directory.count("maintenance_errors")
            logger.warning("%s: maintenance put off: %s", directory.root, error)
            if isinstance(error, OSError):
                directory.io_failed()

    def expire(self) -> None:
        """Remove blocks that are too old, if it is time to look. Raises IndexDamaged, IndexFull."""
        now = self._directory.clock()
        if self._ttl is not None and now >= self._next_expiry:
            self._next_expiry = now + min(60.0, self._ttl / 10)
            self._evictor.expire(now - self._ttl)
