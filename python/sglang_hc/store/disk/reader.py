"""Reading blocks of one directory into host slots and proving every byte."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from sglang_hc.store.disk.backend import File, ThreadMemory
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.format import (
    BlockHeader,
    Chunk,
    Damaged,
    Forged,
    check_chunk,
    check_header,
)
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Most bytes asked for at once, a single chunk apart: large enough that calls cost little, small
enough that a slow disk is noticed before much is read."""

HEADERS = 1024
"""Headers that are kept of blocks that are read by layers: those of a history of 64 K tokens."""


class _TimedOut(Exception):
    pass


@dataclass(eq=False)
class Read:
    """A block that is wanted. into: page-aligned memory. layers: which, None for all. deadline: on
    `time.monotonic`, checked between calls; None for any time."""

    block_id: bytes
    into: memoryview
    layers: Collection[int] | None = None
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
        self._headers: dict[bytes, BlockHeader] = {}
        """By block, of those some of whose layers were read: its other layers will be, too."""
        self._keeping = threading.Lock()

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
        chunks = self._model.chunks
        wanted: Sequence[int] = range(len(chunks))
        if read.layers is not None:
            wanted = [number for number in wanted if chunks[number].layer in read.layers]
            header = self._headers.get(read.block_id)
            if header is not None and self._has(file, read, header, wanted):
                return
        page = self._pages.get(self._model.header_bytes)
        self._fetch(file, read, page, wanted)
        header = check_header(page, read.block_id, self._model)
        self._check(header, read, wanted)
        if read.layers is not None:
            self._keep(header)

    def _has(self, file: File, read: Read, header: BlockHeader, wanted: Sequence[int]) -> bool:
        """Read and prove further layers of a block by the header that the first ones had. False
        where these are not its layers: the block was written anew meanwhile, or is damaged."""
        try:
            self._fetch(file, read, None, wanted)
            self._check(header, read, wanted)
        except Damaged:
            return False
        return True

    def _keep(self, header: BlockHeader) -> None:
        with self._keeping:
            while len(self._headers) >= HEADERS:
                del self._headers[next(iter(self._headers))]
            self._headers[header.block_id] = header

    def _check(self, header: BlockHeader, read: Read, wanted: Sequence[int]) -> None:
        """Raises Damaged when a chunk is not the one of the header."""
        for number in wanted:
            _, start, length = self._model.chunks[number]
            check_chunk(header, number, read.into[start : start + length], self._model.key)

    def _fetch(
        self, file: File, read: Read, page: memoryview | None, wanted: Sequence[int]
    ) -> None:
        """page: memory for the header, if that is wanted. Raises Damaged, OSError, _TimedOut."""
        chunks = [self._model.chunks[number] for number in wanted]
        for offset, buffers in _pieces(page, self._model.header_bytes, chunks, read.into):
            if read.is_late:
                raise _TimedOut
            if file.read(buffers, offset) < sum(map(len, buffers)):
                raise Damaged("the file ends inside the block")

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
    page: memoryview | None, header_bytes: int, wanted: Sequence[Chunk], into: memoryview
) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset in the file, buffers) of the fewest reads that fetch the header into `page`, if it is
    wanted, and the chunks to their places in `into`, none longer than PIECE_BYTES or one chunk."""
    buffers = [] if page is None else [page]
    at = header_bytes if page is None else 0
    start = end = 0  # of the run of neighbouring chunks that is being gathered, in the block
    for chunk in wanted:
        if chunk.offset != end or chunk.offset + chunk.length - start > PIECE_BYTES:
            if end > start:
                buffers.append(into[start:end])
            if buffers:
                yield at, buffers
            buffers, start = [], chunk.offset
            at = header_bytes + start
        end = chunk.offset + chunk.length
    yield at, [*buffers, into[start:end]]
