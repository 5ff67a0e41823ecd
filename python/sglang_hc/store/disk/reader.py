"""Reading a block's chunks into a host slot and proving every byte."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator

from sglang_hc.store.disk.backend import ThreadMemory
from sglang_hc.store.disk.catalog import Catalog, Share
from sglang_hc.store.disk.checksums import Damaged, check_chunk, check_header
from sglang_hc.store.disk.directory import DirectoryFailed
from sglang_hc.store.disk.format import Chunk, slot_header_bytes
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
"""Most bytes asked for at once, so that a slow disk is noticed before the whole block is read."""


class _TimedOut(Exception):
    pass


class BlockReader:
    """Reads blocks of one Catalog. Thread-safe."""

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
        blocks = self._blocks
        if not blocks.usable():
            return self._count(Outcome.IO_ERROR)
        shares = blocks.acquire(block_id)
        if shares is None:
            if block_id in blocks:  # its slab is gone: say so once, not at every lookup
                blocks.drop_damaged(block_id, None)
            return self._count(Outcome.MISSING)
        share: Share | None = None
        try:
            for share in shares:
                self._read_share(block_id, share, into, layers, deadline)
        except _TimedOut:
            return self._count(Outcome.TIMED_OUT)
        except Damaged as problem:
            if blocks.drop_damaged(block_id, share):
                logger.warning("block %s dropped: %s", block_id.hex(), problem)
            return self._count(Outcome.DAMAGED)
        except (OSError, KeyError, DirectoryFailed) as error:
            if blocks.drop_damaged(block_id, share):
                logger.warning("block %s dropped, it cannot be read: %r", block_id.hex(), error)
            if blocks.breaker.failed():
                logger.error("the disk keeps failing; not asking it for a while")
            return self._count(Outcome.IO_ERROR)
        finally:
            blocks.release(shares)
        blocks.breaker.succeeded()
        return self._count(Outcome.OK)

    def _read_share(
        self,
        block_id: bytes,
        share: Share,
        into: memoryview,
        layers: Collection[int] | None,
        deadline: float | None,
    ) -> None:
        """Raises Damaged, OSError, _TimedOut."""
        wanted = [
            index
            for index, chunk in enumerate(share.chunks)
            if layers is None or chunk.layer in layers
        ]
        if not wanted:
            if not share.chunks:
                raise Damaged("the index row names a share that cannot be")
            return
        page = self._pages.get(slot_header_bytes(len(share.chunks)))
        for offset, buffers in _runs(page, share.chunks, wanted, into):
            if deadline is not None and time.monotonic() >= deadline:
                raise _TimedOut
            expected = sum(map(len, buffers))
            if share.directory.slabs.read(share.slot, buffers, offset) < expected:
                raise Damaged("the file ends inside the block")
        header = check_header(page, block_id, self._blocks.fingerprint, share.chunks)
        for index in wanted:
            _, start, length = share.chunks[index]
            check_chunk(header, index, into[start : start + length])
        if share.chunks[wanted[0]] == self._blocks.striping.chunks[0]:  # once for each block
            self._blocks.hit(block_id, header.position)
        self._blocks.counters.add("read_bytes", sum(share.chunks[i].length for i in wanted))

    def _count(self, status: Outcome) -> Outcome:
        name = "read_blocks" if status is Outcome.OK else f"read_{status.value}"
        self._blocks.counters.add(name)
        return status


def _runs(
    page: memoryview, chunks: tuple[Chunk, ...], wanted: list[int], into: memoryview
) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset in the slot, buffers) of the fewest reads that fetch header and wanted chunks, none
    longer than _PIECE_BYTES or one chunk. Neighbours in file and memory become one buffer."""
    starts: list[int] = []
    position = len(page)
    for chunk in chunks:
        starts.append(position)
        position += chunk.length
    run_start, run_end = 0, len(page)
    buffers = [page]
    memory_end = -1
    for index in wanted:
        _, offset, length = chunks[index]
        view = into[offset : offset + length]
        if starts[index] != run_end or run_end + length - run_start > _PIECE_BYTES:
            yield run_start, buffers
            run_start = run_end = starts[index]
            buffers, memory_end = [], -1
        if memory_end == offset:
            start = offset - len(buffers[-1])
            buffers[-1] = into[start : offset + length]
        else:
            buffers.append(view)
        run_end += length
        memory_end = offset + length
    yield run_start, buffers
