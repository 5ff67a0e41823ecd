"""Reading a block's chunks into a host slot and proving every byte."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence

from sglang_hc.store.disk.backend import ThreadMemory
from sglang_hc.store.disk.catalog import Catalog, Location
from sglang_hc.store.disk.checksums import Damaged, check_chunk, check_header
from sglang_hc.store.disk.format import Chunk
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
"""Most bytes asked for at once, so that a slow disk is noticed before the whole block is read."""


class _TimedOut(Exception):
    pass


class BlockReader:
    """Reads blocks of one catalog. Thread-safe."""

    def __init__(self, blocks: Catalog) -> None:
        self._blocks = blocks
        self._pages = ThreadMemory()

    def read(
        self,
        block_id: bytes,
        into: memoryview,
        layers: Collection[int] | None,
        deadline: float | None,
    ) -> Outcome:
        """See DiskStore.read."""
        outcome = self._read(block_id, into, layers, deadline)
        name = "read_blocks" if outcome is Outcome.OK else f"read_{outcome.value}"
        self._blocks.counters.add(name)
        return outcome

    def _read(
        self,
        block_id: bytes,
        into: memoryview,
        layers: Collection[int] | None,
        deadline: float | None,
    ) -> Outcome:
        blocks = self._blocks
        location = blocks.acquire(block_id)
        if location is None:
            return self._why_not_here(block_id)
        try:
            self._fetch(block_id, location, into, layers, deadline)
        except _TimedOut:
            return Outcome.TIMED_OUT
        except Damaged as problem:
            if blocks.drop_damaged(block_id, location):
                logger.warning("block %s dropped: %s", block_id.hex(), problem)
            return Outcome.DAMAGED
        except (OSError, KeyError) as error:
            if blocks.drop_damaged(block_id, location):
                logger.warning("block %s dropped, it cannot be read: %r", block_id.hex(), error)
            blocks.io_failed(location.directory)
            return Outcome.IO_ERROR
        finally:
            blocks.release(location)
        blocks.io_succeeded(location.directory)
        return Outcome.OK

    def _why_not_here(self, block_id: bytes) -> Outcome:
        if block_id in self._blocks:  # its slab is gone: say so once, not at every lookup
            self._blocks.remove([block_id])
        out = self._blocks.is_out_of_use(block_id)
        return Outcome.IO_ERROR if out else Outcome.MISSING

    def _fetch(
        self,
        block_id: bytes,
        location: Location,
        into: memoryview,
        layers: Collection[int] | None,
        deadline: float | None,
    ) -> None:
        """Raises Damaged, OSError, _TimedOut, and KeyError when the slab is gone."""
        slot_format = self._blocks.slot_format
        chunks = slot_format.chunks
        wanted = [i for i, chunk in enumerate(chunks) if layers is None or chunk.layer in layers]
        if not wanted:
            return
        page = self._pages.get(slot_format.header_bytes)
        for offset, buffers in _pieces(page, [chunks[i] for i in wanted], into):
            if deadline is not None and time.monotonic() >= deadline:
                raise _TimedOut
            expected = sum(map(len, buffers))
            if location.directory.slabs.read(location.place, buffers, offset) < expected:
                raise Damaged("the file ends inside the block")
        header = check_header(page, block_id, self._blocks.fingerprint, chunks)
        for index in wanted:
            _, start, length = chunks[index]
            check_chunk(header, index, into[start : start + length])
        if wanted[0] == 0:  # so that a block that is read layer by layer counts once
            self._blocks.hit(block_id, header.position)
        self._blocks.counters.add("read_bytes", sum(chunks[i].length for i in wanted))


def _pieces(
    page: memoryview, wanted: Sequence[Chunk], into: memoryview
) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset in the slot, buffers) of the fewest reads that fetch the header into `page` and the
    chunks to their places in `into`, none longer than _PIECE_BYTES or one chunk."""
    buffers = [page]
    at = 0
    start = end = 0  # of the run of neighbouring chunks that is being gathered, in the block
    for chunk in wanted:
        if chunk.offset != end or chunk.offset + chunk.length - start > _PIECE_BYTES:
            if end > start:
                buffers.append(into[start:end])
            if buffers:
                yield at, buffers
            buffers, start = [], chunk.offset
            at = len(page) + start
        end = chunk.offset + chunk.length
    yield at, [*buffers, into[start:end]]
