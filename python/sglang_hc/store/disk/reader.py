"""Reading blocks of one directory into host slots and proving every byte."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing

from sglang_hc.store.block import Block
from sglang_hc.store.disk.backend import File, ThreadMemory
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.format import Damaged, Forged, check_block, check_header
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Most bytes asked for at once, the header apart: large enough that calls cost little, small enough
that a slow disk is noticed before much is read. Whole pages."""


class _TimedOut(Exception):
    pass


class BlockReader:
    """Reads blocks of one directory. Thread-safe."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._model = directory.model
        self._pages = ThreadMemory()

    def read(self, block_id: bytes, into: memoryview, deadline: float | None) -> Outcome:
        """See `DiskStore.read`. A block that is not here any more is MISSING."""
        directory = self._directory
        try:
            with closing(directory.backend.open(directory.path(block_id))) as file:
                self._read(file, block_id, into, deadline)
        except FileNotFoundError:
            directory.forget(block_id)
            return Outcome.MISSING
        except _TimedOut:
            return Outcome.TIMED_OUT
        except (Damaged, IsADirectoryError) as problem:
            directory.count("forged", isinstance(problem, Forged))
            # The file of a block that is evicted while it is read gets other bytes.
            return Outcome.DAMAGED if self._drop(block_id, problem) else Outcome.MISSING
        except OSError as problem:
            self._drop(block_id, problem)
            directory.io_failed(problem)
            return Outcome.IO_ERROR
        directory.io_succeeded()
        return Outcome.OK

    def named(self, block_id: bytes) -> Block | None:
        """See `DiskStore.named`. What is wrong with a block is found again by whoever reads it."""
        directory, page = self._directory, self._pages.get(self._model.header_bytes)
        try:
            with closing(directory.backend.open(directory.path(block_id))) as file:
                file.read([page], 0)
            header = check_header(page, block_id, self._model)
        except (Damaged, OSError):
            return None
        if not header.names_its_tokens():
            return None
        return Block(block_id, header.parent_id, header.label, header.position, header.tokens)

    def _read(self, file: File, block_id: bytes, into: memoryview, deadline: float | None) -> None:
        """Raises Damaged, OSError, _TimedOut."""
        model = self._model
        page = self._pages.get(model.header_bytes)
        for offset, buffers in _pieces(page, into[: model.block_bytes]):
            if deadline is not None and time.monotonic() >= deadline:
                raise _TimedOut
            if file.read(buffers, offset) < sum(map(len, buffers)):
                raise Damaged("the file ends inside the block")
        check_block(page, into, block_id, model)

    def _drop(self, block_id: bytes, problem: Exception) -> bool:
        """Remove a block that cannot be served. False when it was not there any more."""
        directory = self._directory
        try:
            there = directory.unlink(directory.folder, block_id)
        except OSError as error:
            logger.warning("block %s cannot be removed: %s", block_id.hex(), error)
            there = True
        if there:
            logger.warning("block %s dropped: %r", block_id.hex(), problem)
        return there


def _pieces(page: memoryview, data: memoryview) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset in the file, buffers) of the reads that fetch the header into `page` and what follows
    it into `data`."""
    yield 0, [page, data[:PIECE_BYTES]]
    for start in range(PIECE_BYTES, len(data), PIECE_BYTES):
        yield len(page) + start, [data[start : start + PIECE_BYTES]]
