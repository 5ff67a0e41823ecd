"""Reading blocks of one directory into host slots and proving every byte."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from sglang_hc.store.disk.backend import File, ThreadMemory
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.format import Chunk, Damaged, Forged, check_block
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Most bytes asked for at once, a single chunk apart: large enough that calls cost little, small
enough that a slow disk is noticed before much is read."""


class _TimedOut(Exception):
    pass


@dataclass(eq=False)
class Read:
    """A block that is wanted. into: page-aligned memory. deadline: on `time.monotonic`, checked
    between calls; None for any time."""

    block_id: bytes
    into: memoryview
    deadline: float | None = None

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


class BlockReader:
    """Reads blocks of one directory. Thread-safe."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._model = directory.model
        self._pages = ThreadMemory()

    def read(self, read: Read) -> Outcome:
        """See `DiskStore.read`. A block that is not here any more is MISSING."""
        directory, block_id = self._directory, read.block_id
        try:
            with closing(directory.backend.open(directory.path(block_id))) as file:
                self._read(file, read)
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
            directory.io_failed()
            return Outcome.IO_ERROR
        directory.io_succeeded()
        return Outcome.OK

    def _read(self, file: File, read: Read) -> None:
        """Raises Damaged, OSError, _TimedOut."""
        model = self._model
        page = self._pages.get(model.header_bytes)
        for offset, buffers in _pieces(page, model.chunks, read.into):
            if read.is_late:
                raise _TimedOut
            if file.read(buffers, offset) < sum(map(len, buffers)):
                raise Damaged("the file ends inside the block")
        check_block(page, read.into, read.block_id, model)

    def _drop(self, block_id: bytes, problem: Exception) -> bool:
        """Remove a block that cannot be served. False when it was not there any more."""
        directory = self._directory
        try:
            there = directory.remove([block_id]) > 0
        except OSError as error:
            logger.warning("block %s cannot be removed: %s", block_id.hex(), error)
            there = True
        if there:
            logger.warning("block %s dropped: %r", block_id.hex(), problem)
        return there


def _pieces(
    page: memoryview, chunks: Sequence[Chunk], into: memoryview
) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset in the file, buffers) of the fewest reads that fetch the header into `page` and the
    chunks to their places in `into`, none longer than PIECE_BYTES or one chunk."""
    buffers, at = [page], 0
    start = end = 0  # of the run of neighbouring chunks that is being gathered, in the block
    for chunk in chunks:
        if chunk.offset != end or chunk.offset + chunk.length - start > PIECE_BYTES:
            if end > start:
                buffers.append(into[start:end])
            yield at, buffers
            buffers, start = [], chunk.offset
            at = len(page) + start
        end = chunk.offset + chunk.length
    yield at, [*buffers, into[start:end]]
