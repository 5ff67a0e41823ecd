"""Writing blocks: bytes into a file of another name, and then the name that lookups know.

Nothing is synced: a read proves every byte, so what a power cut leaves is a block or nothing.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress

import xxhash

from sglang_hc.store.block import Block
from sglang_hc.store.disk.backend import FULL, ThreadMemory
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.format import seal_block
from sglang_hc.store.disk.sharing import LockTimeout
from sglang_hc.store.outcome import GOOD, Outcome

logger = logging.getLogger(__name__)


class Dealer:
    """Which directory takes a block: a hash of both says it, in proportion to the budgets, so that
    the blocks of one prefix are read from all directories at once (HCache section 4.2), all fill at
    the same time, and a directory more or less moves only its own part."""

    def __init__(self, directories: Sequence[Directory]) -> None:
        self._places = [(one, one.root.encode(), one.budget) for one in directories]

    def order(self, block_id: bytes) -> list[Directory]:
        """The usable directories, in the order in which they should be asked for room."""
        usable = [one for one in self._places if one[0].usable()]
        if len(usable) < 2:
            return [directory for directory, _, _ in usable]
        usable.sort(key=lambda one: _distance(block_id, one[1], one[2]))
        return [directory for directory, _, _ in usable]


def _distance(block_id: bytes, name: bytes, weight: int) -> float:
    """Rendezvous hashing: each place is the nearest one in proportion to its weight."""
    return -math.log((xxhash.xxh3_64_intdigest(block_id + name) + 1) / 2**64) / weight


class BlockWriter:
    """Writes blocks of one model to its directories. Thread-safe."""

    def __init__(self, evictors: Mapping[Directory, Evictor]) -> None:
        self._evictors = evictors
        self._lock = threading.Condition()
        """Held over memory alone, never over a disk; told of each write that is over."""
        self._under_way: set[bytes] = set()
        self._numbers = itertools.count()
        self._pages = ThreadMemory()

    def write(self, block: Block, data: memoryview, order: Iterable[Directory]) -> Outcome:
        """See `DiskStore.write`. order: of the directories."""
        with self._lock:
            there = any(d.usable() and block.block_id in d.blocks for d in self._evictors)
            if there or block.block_id in self._under_way:
                return Outcome.DUPLICATE
            self._under_way.add(block.block_id)
        try:
            outcome = Outcome.IO_ERROR
            for directory in filter(Directory.usable, order):
                outcome = self._write_to(directory, block, data)
                if outcome in (*GOOD, Outcome.DROPPED):  # another one may be as busy
                    break
            return outcome
        finally:
            with self._lock:
                self._under_way.remove(block.block_id)
                self._lock.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait for the writes that are under way now, at most so long. Whether all are over."""
        with self._lock:
            left = self._under_way.copy()
            return self._lock.wait_for(lambda: not left & self._under_way, seconds)

    def _write_to(self, directory: Directory, block: Block, data: memoryview) -> Outcome:
        used = directory.use_time(block.position)
        try:
            if not directory.membership.alone and directory.find(block.block_id):
                return Outcome.DUPLICATE
            if not self._write_file(directory, block, data, used):
                return Outcome.NO_SPACE
        except OSError as error:
            return self._failed(directory, error)
        directory.io_succeeded()
        directory.add(block.block_id, used)
        return Outcome.OK

    def _write_file(self, directory: Directory, block: Block, data: memoryview, used: int) -> bool:
        """A file with the block in it; False when there is no room. Raises OSError, and leaves none
        then."""
        model, backend, evictor = directory.model, directory.backend, self._evictors[directory]
        page = self._pages.get(model.header_bytes)
        seal_block(page, data, block, model, int(directory.clock() * 1e6))
        path = directory.membership.path_of(next(self._numbers), model.file_bytes)
        file = evictor.make_file(path)
        if file is None:
            return False
        try:
            with closing(file):
                file.write([page, data[: model.block_bytes]], 0)
            backend.note_use(path, used)
            evictor.publish(path, block.block_id)
        except BaseException:
            with suppress(OSError):
                evictor.drop_file(path)
            raise
        return True

    def _failed(self, directory: Directory, error: OSError) -> Outcome:
        """The answer to a write that failed so; counted and logged."""
        if error.errno in FULL:
            with suppress(OSError):
                self._evictors[directory].disk_is_full()
            return Outcome.NO_SPACE
        logger.warning("%s: a block could not be written: %s", directory.root, error)
        directory.io_failed(error)
        return Outcome.DROPPED if isinstance(error, LockTimeout) else Outcome.IO_ERROR
