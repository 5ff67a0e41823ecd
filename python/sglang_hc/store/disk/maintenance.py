"""What the store does on its own: uses to the disk, expiry, and a look at who else is there."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from sglang_hc.store.disk.eviction import Evictor

logger = logging.getLogger(__name__)

TICK_S = 1.0
LOOK_S = 10.0
"""How often it is found out who else has a directory open, and what they stored."""
FIND_SHARE = 0.01
"""Most of the time that may go into reading what others stored: a large directory is read less
often."""
COUNT_S = 600.0
"""How often all files are counted: some may have been removed by hand."""


@dataclass(frozen=True)
class Upkeep:
    """What is done without being asked.

    ttl_s: a block not used for that long is removed; None keeps it until its room is needed.
    background: on threads of its own; otherwise whoever has the store calls `tick`.
    """

    ttl_s: float | None = None
    background: bool = True


class Maintenance:
    """Tends one directory, on a thread of its own once `start` was called: a directory that hangs
    holds up no other. The thread never dies of an error: it says so, counts it and goes on."""

    def __init__(self, evictor: Evictor, upkeep: Upkeep) -> None:
        self._directory = evictor.directory
        self._evictor = evictor
        self._ttl = upkeep.ttl_s
        self._next_look = self._next_find = self._next_expiry = 0.0
        self._next_count = self._directory.clock() + COUNT_S
        self._owes_find = False
        """Others were here since their blocks were looked for."""
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

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            self._tick_unless_broken()

    def _tick_unless_broken(self) -> None:
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
            directory.note_touches()
            self._look()
            self._expire()
        except OSError as error:
            directory.count("maintenance_errors")
            logger.warning("%s: maintenance put off: %s", directory.root, error)
            directory.io_failed(error)

    def _look(self) -> None:
        directory, now = self._directory, self._directory.clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        was_alone = directory.membership.alone
        directory.membership.look()
        if not (was_alone and directory.membership.alone):
            self._owes_find = True
        is_due = now >= self._next_count
        if is_due:
            self._next_count = now + COUNT_S
        self._evictor.look(count=is_due)
        if self._owes_find and now >= self._next_find:
            began = directory.clock()
            directory.find_others()
            self._owes_find = False
            self._next_find = now + (directory.clock() - began) / FIND_SHARE
        while not self._stop.is_set() and self._evictor.trim():
            pass

    def _expire(self) -> None:
        now = self._directory.clock()
        if self._ttl is not None and now >= self._next_expiry:
            self._next_expiry = now + min(60.0, self._ttl / 10)
            self._evictor.expire(int((now - self._ttl) * 1e9))
