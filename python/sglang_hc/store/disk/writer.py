"""Writing blocks: bytes first, then one sync, then the rows that make them visible."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sglang_hc.store.disk.backend import ThreadMemory
from sglang_hc.store.disk.catalog import Catalog, Share
from sglang_hc.store.disk.directory import Directory, DirectoryFailed
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.format import SlotHeader, clip_label, make_table
from sglang_hc.store.disk.index import ROWS_PER_COMMIT
from sglang_hc.store.disk.schema import IndexFull, Place, Row
from sglang_hc.store.outcome import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Block:
    """What names a block.

    block_id, parent_id: 16 bytes each (tree.identity). namespace: label for people, not identity.
    position: blocks before this one in its prefix. tokens: packed token ids, at most 256 bytes.
    """

    block_id: bytes
    parent_id: bytes
    namespace: str
    position: int
    tokens: bytes


@dataclass
class _Claim:
    """One block of a batch and the slots taken for it, one share per directory."""

    number: int
    block: Block
    data: memoryview
    shares: list[Share] = field(default_factory=list)


class BlockWriter:
    """Writes blocks of one Catalog. Thread-safe."""

    def __init__(self, blocks: Catalog, evictor: Evictor) -> None:
        self._blocks = blocks
        self._evictor = evictor
        self._lock = threading.Lock()
        self._under_way: set[bytes] = set()
        self._pages = ThreadMemory()

    def write_many(self, items: Sequence[tuple[Block, memoryview]]) -> list[Outcome]:
        """See DiskStore.write_many."""
        statuses: list[Outcome] = []
        for start in range(0, len(items), ROWS_PER_COMMIT):
            statuses += self._write_batch(items[start : start + ROWS_PER_COMMIT])
        for status, (_, data) in zip(statuses, items, strict=True):
            if status is Outcome.OK:
                self._blocks.counters.add("written_blocks")
                self._blocks.counters.add("written_bytes", len(data))
            else:
                self._blocks.counters.add(f"write_{status.value}")
        return statuses

    def _write_batch(self, items: Sequence[tuple[Block, memoryview]]) -> list[Outcome]:
        statuses = [Outcome.IO_ERROR] * len(items)
        if not self._blocks.usable():
            return statuses
        claims: list[_Claim] = []
        kept: set[int] = set()
        try:
            for number, (block, data) in enumerate(items):
                claim = _Claim(number, block, data)
                if not self._begin(block.block_id):
                    statuses[number] = Outcome.DUPLICATE
                    continue
                claims.append(claim)
                statuses[number] = self._fill(claim)
            written = [c for c in claims if statuses[c.number] is Outcome.OK]
            for claim in written:
                statuses[claim.number] = Outcome.IO_ERROR
            outcome = self._publish(written)
            for claim in written:
                statuses[claim.number] = outcome
            if outcome is Outcome.OK:
                kept.update(claim.number for claim in written)
        finally:
            for claim in claims:
                self._end(claim, keep=claim.number in kept)
        return statuses

    def _begin(self, block_id: bytes) -> bool:
        with self._lock:
            if block_id in self._under_way or block_id in self._blocks:
                return False
            self._under_way.add(block_id)
            return True

    def _end(self, claim: _Claim, keep: bool) -> None:
        for share in claim.shares:
            if not keep:
                share.directory.slabs.release([share.slot])
            share.directory.slabs.unlease([share.slot])
        with self._lock:
            self._under_way.discard(claim.block.block_id)

    def _fill(self, claim: _Claim) -> Outcome:
        """Take slots and write the bytes of every share."""
        striping = self._blocks.striping
        try:
            for number, directory in enumerate(self._blocks.directories):
                slot = self._evictor.slot(directory)
                if slot is None:
                    return Outcome.NO_SPACE
                residue = striping.residue(claim.block.position, number)
                claim.shares.append(
                    Share(directory, Place(*slot, residue), striping.shares[residue])
                )
            for share in claim.shares:
                self._write_share(claim, share)
        except OSError as error:
            return self._failed(error)
        except DirectoryFailed:
            return Outcome.IO_ERROR
        return Outcome.OK

    def _failed(self, error: OSError) -> Outcome:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Outcome.NO_SPACE
        logger.warning("a block could not be written: %s", error)
        if self._blocks.breaker.failed():
            logger.error("the disk keeps failing; not asking it for a while")
        return Outcome.IO_ERROR

    def _write_share(self, claim: _Claim, share: Share) -> None:
        block, fingerprint = claim.block, self._blocks.fingerprint
        header = SlotHeader(
            block.block_id,
            block.parent_id,
            fingerprint,
            self._blocks.striping.stripes,
            share.place.residue,
            int(self._blocks.clock() * 1e6),
            block.position,
            block.tokens,
            block.namespace,
            make_table(block.block_id, fingerprint, share.chunks, claim.data),
        )
        page = self._pages.get(header.header_bytes)
        header.pack_into(page)
        buffers = [page, *_views(share, claim.data)]
        share.directory.slabs.write(share.slot, buffers)

    def _publish(self, claims: Sequence[_Claim]) -> Outcome:
        """Sync the bytes, commit the rows, and only then let lookups see the blocks."""
        if not claims:
            return Outcome.OK
        committed: list[Directory] = []
        try:
            for number, directory in enumerate(self._blocks.directories):
                directory.slabs.sync(claim.shares[number].place.slab for claim in claims)
            for number, directory in enumerate(self._blocks.directories):
                rows = [self._row(directory, claim, claim.shares[number]) for claim in claims]
                with directory.guarded():
                    replaced = directory.index.insert(rows)
                committed.append(directory)
                directory.slabs.release(place[:2] for place in replaced)
        except OSError as error:
            self._take_back(committed, claims)
            return self._failed(error)
        except IndexFull as error:
            logger.warning("the index takes no more blocks: %s", error)
            self._blocks.counters.add("index_refused")
            self._take_back(committed, claims)
            return Outcome.NO_SPACE
        except DirectoryFailed:
            self._take_back(committed, claims)
            return Outcome.IO_ERROR
        for claim in claims:
            for share in reversed(claim.shares):  # the first directory last, see Catalog.remove
                share.directory.catalog[claim.block.block_id] = share.place.pack()
        self._blocks.breaker.succeeded()
        return Outcome.OK

    def _row(self, directory: Directory, claim: _Claim, share: Share) -> Row:
        block = claim.block
        with directory.guarded():
            namespace = directory.namespace(clip_label(block.namespace))
        return Row(
            directory.model,
            block.block_id,
            namespace,
            share.place.slab,
            share.place.slot,
            self._blocks.striping.stripes,
            share.place.residue,
            int(self._blocks.clock() * 1e6),
            self._blocks.access_time(block.position),
            0,
        )

    def _take_back(self, committed: Sequence[Directory], claims: Sequence[_Claim]) -> None:
        """Delete rows again whose blocks did not get all their shares; `_end` frees the slots.

        Rows that cannot be deleted now keep their slots; the next start finds them incomplete.
        """
        ids = [claim.block.block_id for claim in claims]
        for directory in committed:
            deleted = False
            with self._blocks.counters.refusals(), suppress(DirectoryFailed), directory.guarded():
                directory.index.delete(self._blocks.fingerprint, ids)
                deleted = True
            if not deleted:
                self._leave(directory, claims)

    @staticmethod
    def _leave(directory: Directory, claims: Sequence[_Claim]) -> None:
        logger.warning("%s: rows of a failed write stay until the next start", directory.root)
        for claim in claims:
            left = [share for share in claim.shares if share.directory is directory]
            claim.shares = [share for share in claim.shares if share.directory is not directory]
            directory.slabs.unlease(share.slot for share in left)


def _views(share: Share, data: memoryview) -> list[memoryview]:
    """The share's chunks inside the block's slot, neighbours as one buffer."""
    spans: list[tuple[int, int]] = []
    for _, offset, length in share.chunks:
        if spans and spans[-1][1] == offset:
            spans[-1] = (spans[-1][0], offset + length)
        else:
            spans.append((offset, offset + length))
    return [data[start:end] for start, end in spans]
