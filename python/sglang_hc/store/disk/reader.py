"""Reading blocks of one directory into host slots and proving every byte."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from sglang_hc.store.disk.backend import ThreadMemory
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.format import (
    Chunk,
    Damaged,
    SlotHeader,
    check_chunk,
    check_header,
)
from sglang_hc.store.disk.index_file import Place, Row
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)

RUN_BYTES = 4 << 20
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

    @property
    def is_whole(self) -> bool:
        """Whether all of the block is still wanted."""
        return self.layers is None and not self.is_late


class _Found(NamedTuple):
    """A read of a block that is here, its slot leased. page: memory for its header."""

    place: Place
    read: Read
    page: memoryview

    def can_join(self, other: _Found) -> bool:
        """Whether one call may read it and then the other one."""
        slab, slot = self.place
        return other.place == (slab, slot + 1) and self.read.is_whole and other.read.is_whole


class BlockReader:
    """Reads blocks of one directory. Thread-safe."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._model = directory.model
        self._pages = ThreadMemory()
        self._headers: dict[bytes, SlotHeader] = {}
        """By block, of those some of whose layers were read: its other layers will be, too."""
        self._keeping = threading.Lock()

    def read_many(self, reads: Sequence[Read]) -> dict[Read, Outcome]:
        """See `DiskStore.read_many`. A block that is not here any more is MISSING."""
        outcomes = dict.fromkeys(reads, Outcome.MISSING)
        found: list[_Found] = []
        size = self._model.header_bytes
        pages = self._pages.get(size * len(reads))
        for number, read in enumerate(reads):
            place = self._directory.acquire(read.block_id)
            if place is not None:
                found.append(_Found(place, read, pages[number * size : (number + 1) * size]))
        try:
            for run in self._runs(found):
                together = len(run) > 1 and self._fetch_run(run)
                for one in run:
                    outcomes[one.read] = self._finish(one, fetched=together)
        finally:
            self._directory.slabs.unlease(one.place for one in found)
        return outcomes

    def _runs(self, found: Sequence[_Found]) -> Iterator[list[_Found]]:
        """Blocks that one call can read, because they lie side by side in one slab."""
        run: list[_Found] = []
        most = max(1, RUN_BYTES // self._model.slot_bytes)
        for one in sorted(found, key=attrgetter("place")):
            if run and (len(run) == most or not run[-1].can_join(one)):
                yield run
                run = []
            run.append(one)
        if run:
            yield run

    def _fetch_run(self, run: Sequence[_Found]) -> bool:
        """Read several blocks by one call. False when that failed: each is then read alone, so that
        only those that cannot be read are lost."""
        size = self._model.block_bytes
        buffers = [part for one in run for part in (one.page, one.read.into[:size])]
        try:
            done = self._directory.slabs.read(run[0].place, buffers)
        except (OSError, KeyError):
            return False
        return done == len(run) * self._model.slot_bytes

    def _finish(self, one: _Found, fetched: bool) -> Outcome:
        """Read a block unless that was done, and prove it; it is removed if that fails."""
        directory, read = self._directory, one.read
        chunks = self._model.chunks
        wanted: Sequence[int] = range(len(chunks))
        if read.layers is not None:
            wanted = [number for number in wanted if chunks[number].layer in read.layers]
        try:
            header = self._read_more(one, wanted)
            if header is None:
                if not fetched:
                    self._fetch(one, wanted)
                header = check_header(one.page, read.block_id, self._model.fingerprint, chunks)
                self._check(header, one, wanted)
                if read.layers is not None:
                    self._keep(header)
        except _TimedOut:
            return Outcome.TIMED_OUT
        except (Damaged, OSError, KeyError) as problem:
            if directory.drop_damaged(Row(directory.number, read.block_id, *one.place)):
                logger.warning("block %s dropped: %r", read.block_id.hex(), problem)
            if isinstance(problem, Damaged):
                return Outcome.DAMAGED
            directory.io_failed()
            return Outcome.IO_ERROR
        if 0 in wanted:  # so that a block that is read layer by layer counts once
            directory.hit(read.block_id, header.position)
        directory.io_succeeded()
        return Outcome.OK

    def _read_more(self, one: _Found, wanted: Sequence[int]) -> SlotHeader | None:
        """Read and prove further layers of a block by the header that the first ones had. None when
        there was none, or these are not its layers: the block was written anew meanwhile, or is
        damaged. Raises as `_fetch`."""
        header = self._headers.get(one.read.block_id)
        if header is None or one.read.layers is None:
            return None
        try:
            self._fetch(one, wanted, with_header=False)
            self._check(header, one, wanted)
        except Damaged:
            return None
        return header

    def _keep(self, header: SlotHeader) -> None:
        with self._keeping:
            while len(self._headers) >= HEADERS:
                del self._headers[next(iter(self._headers))]
            self._headers[header.block_id] = header

    def _check(self, header: SlotHeader, one: _Found, wanted: Sequence[int]) -> None:
        """Raises Damaged when a chunk is not the one of the header."""
        for number in wanted:
            _, start, length = self._model.chunks[number]
            check_chunk(header, number, one.read.into[start : start + length])

    def _fetch(self, one: _Found, wanted: Sequence[int], *, with_header: bool = True) -> None:
        """Raises Damaged, OSError, _TimedOut, and KeyError when the slab is gone."""
        chunks = [self._model.chunks[number] for number in wanted]
        for offset, buffers in _pieces(one.page, chunks, one.read.into, with_header):
            if one.read.is_late:
                raise _TimedOut
            done = self._directory.slabs.read(one.place, buffers, offset)
            if done < sum(map(len, buffers)):
                raise Damaged("the file ends inside the block")


def _pieces(
    page: memoryview, wanted: Sequence[Chunk], into: memoryview, with_header: bool
) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset in the slot, buffers) of the fewest reads that fetch the header into `page`, if it is
    wanted, and the chunks to their places in `into`, none longer than RUN_BYTES or one chunk."""
    buffers = [page] if with_header else []
    at = 0 if with_header else len(page)
    start = end = 0  # of the run of neighbouring chunks that is being gathered, in the block
    for chunk in wanted:
        if chunk.offset != end or chunk.offset + chunk.length - start > RUN_BYTES:
            if end > start:
                buffers.append(into[start:end])
            if buffers:
                yield at, buffers
            buffers, start = [], chunk.offset
            at = len(page) + start
        end = chunk.offset + chunk.length
    yield at, [*buffers, into[start:end]]
