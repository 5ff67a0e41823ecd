"""Reading blocks into host slots and proving every byte."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sglang_hc.store.disk.backend import ThreadMemory
from sglang_hc.store.disk.catalog import Catalog, Location
from sglang_hc.store.disk.format import Chunk, Damaged, SlotHeader, check_chunk, check_header
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)

RUN_BYTES = 4 << 20
"""Most bytes asked for at once, a single chunk apart: large enough that calls cost little, small
enough that a slow disk is noticed before much is read."""


class _TimedOut(Exception):
    pass


@dataclass(eq=False)
class Read:
    """A block that is wanted. into: page-aligned memory. layers: which, None for all. deadline: on
    `time.monotonic`; None for any time."""

    block_id: bytes
    into: memoryview
    layers: Collection[int] | None = None
    deadline: float | None = None


@dataclass(eq=False)
class _Found:
    """A read of a block that is here. page: memory for its header."""

    read: Read
    location: Location
    page: memoryview

    def place_in_order(self) -> tuple[int, int, int]:
        directory, place = self.location
        return id(directory), place.slab, place.slot

    @property
    def can_join(self) -> bool:
        """Whether one call may read it together with its neighbours."""
        late = self.read.deadline is not None and time.monotonic() >= self.read.deadline
        return self.read.layers is None and not late


class BlockReader:
    """Reads blocks of one catalog. Thread-safe."""

    def __init__(self, blocks: Catalog) -> None:
        self._blocks = blocks
        self._format = blocks.model.slot_format
        self._pages = ThreadMemory()

    def read_many(self, reads: Sequence[Read]) -> list[Outcome]:
        """See DiskStore.read_many."""
        outcomes: dict[Read, Outcome] = {}
        found: list[_Found] = []
        size = self._format.header_bytes
        pages = self._pages.get(size * len(reads))
        for number, read in enumerate(reads):
            location = self._blocks.acquire(read.block_id)
            if location is None:
                outcomes[read] = self._not_here(read.block_id)
            else:
                found.append(_Found(read, location, pages[number * size : (number + 1) * size]))
        try:
            for run in self._runs(found):
                together = len(run) > 1 and self._fetch_run(run)
                for one in run:
                    outcomes[one.read] = self._finish(one, fetched=together)
        finally:
            for one in found:
                self._blocks.release(one.location)
        return [outcomes[read] for read in reads]

    def _not_here(self, block_id: bytes) -> Outcome:
        if self._blocks.contains([block_id]):  # its slab is gone: not found again
            self._blocks.remove([block_id])
        return self._blocks.absence(block_id)

    def _runs(self, found: Iterable[_Found]) -> Iterator[list[_Found]]:
        """Blocks that one call can read, because they lie side by side in one slab."""
        run: list[_Found] = []
        most = max(1, RUN_BYTES // self._format.slot_bytes)
        for one in sorted(found, key=_Found.place_in_order):
            if run:
                directory, slab, slot = run[-1].place_in_order()
                follows = one.place_in_order() == (directory, slab, slot + 1)
                if not follows or len(run) == most or not (run[-1].can_join and one.can_join):
                    yield run
                    run = []
            run.append(one)
        if run:
            yield run

    def _fetch_run(self, run: Sequence[_Found]) -> bool:
        """Read several blocks by one call. False when that failed: each is then read alone, so that
        only those that cannot be read are lost."""
        size = self._format.block_bytes
        buffers = [part for one in run for part in (one.page, one.read.into[:size])]
        directory, place = run[0].location
        try:
            done = directory.slabs.read(place, buffers)
        except (OSError, KeyError):
            return False
        return done == len(run) * self._format.slot_bytes

    def _finish(self, one: _Found, fetched: bool) -> Outcome:
        """Read a block unless that was done, prove it, and count what came of it."""
        blocks, block_id, directory = self._blocks, one.read.block_id, one.location.directory
        try:
            wanted = self._wanted(one.read)
            if not fetched:
                self._fetch(one, wanted)
            header = check_header(one.page, block_id, blocks.model.fingerprint, self._format.chunks)
            self._prove(header, one.read.into, wanted)
        except _TimedOut:
            outcome = Outcome.TIMED_OUT
        except Damaged as problem:
            if blocks.drop_damaged(block_id, one.location):
                logger.warning("block %s dropped: %s", block_id.hex(), problem)
            outcome = Outcome.DAMAGED
        except (OSError, KeyError) as error:
            if blocks.drop_damaged(block_id, one.location):
                logger.warning("block %s dropped, it cannot be read: %r", block_id.hex(), error)
            blocks.io_failed(directory)
            outcome = Outcome.IO_ERROR
        else:
            if 0 in wanted:  # so that a block that is read layer by layer counts once
                blocks.hit(directory, block_id, header.position)
            blocks.io_succeeded(directory)
            blocks.counted.add("read_blocks")
            return Outcome.OK
        blocks.counted.add(f"read_{outcome.value}")
        return outcome

    def _wanted(self, read: Read) -> Sequence[int]:
        """Numbers of the chunks that are wanted."""
        chunks = self._format.chunks
        if read.layers is None:
            return range(len(chunks))
        return [number for number, chunk in enumerate(chunks) if chunk.layer in read.layers]

    def _fetch(self, one: _Found, wanted: Sequence[int]) -> None:
        """Raises Damaged, OSError, _TimedOut, and KeyError when the slab is gone."""
        directory, place = one.location
        chunks = [self._format.chunks[number] for number in wanted]
        for offset, buffers in _pieces(one.page, chunks, one.read.into):
            if one.read.deadline is not None and time.monotonic() >= one.read.deadline:
                raise _TimedOut
            if directory.slabs.read(place, buffers, offset) < sum(map(len, buffers)):
                raise Damaged("the file ends inside the block")

    def _prove(self, header: SlotHeader, data: memoryview, wanted: Sequence[int]) -> None:
        """Raises Damaged."""
        for number in wanted:
            _, start, length = self._format.chunks[number]
            check_chunk(header, number, data[start : start + length])


def _pieces(
    page: memoryview, wanted: Sequence[Chunk], into: memoryview
) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset in the slot, buffers) of the fewest reads that fetch the header into `page` and the
    chunks to their places in `into`, none longer than RUN_BYTES or one chunk."""
    buffers = [page]
    at = 0
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
