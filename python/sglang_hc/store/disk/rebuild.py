"""A new index from the slot headers, when the old one is missing or malformed."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from sglang_hc.store.disk import index_file
from sglang_hc.store.disk.backend import Backend, File
from sglang_hc.store.disk.format import Damaged, FormatError, SlabHeader, SlotHeader, read_header
from sglang_hc.store.disk.index import ROWS_PER_COMMIT, Index
from sglang_hc.store.disk.index_file import IndexDamaged, IndexFull, Row
from sglang_hc.store.disk.slabs import read_slab_header, slab_numbers, slab_path

logger = logging.getLogger(__name__)

RECOVERED_LABEL = "(recovered)"


def rebuild_index(root: str, path: str, backend: Backend) -> int:
    """Replace the index at `path` by one made from the slot headers. Returns the blocks found.

    Reads one page per slot. Where two slots hold the same block the later one counts. Access times
    become write times. A half-made index is not left under the name `path`. Raises OSError,
    IndexDamaged, IndexFull, and UnknownVersion before anything was changed.
    """
    _refuse_other_versions(root, path, backend)
    fresh = path + ".new"
    _unlink_index(path)  # before the new one is made: the budget has no room for both
    _unlink_index(fresh)
    index_file.create(fresh)
    index = Index(fresh)
    try:
        count = _fill(index, root, backend)
    finally:
        index.close()
    os.rename(fresh, path)
    backend.sync_directory(root)
    return count


def _refuse_other_versions(root: str, path: str, backend: Backend) -> None:
    """Raises UnknownVersion if the index or a slab was written by another version."""
    if os.path.exists(path):
        with suppress(IndexDamaged, IndexFull):
            Index(path).close()
    for number in slab_numbers(root):
        file = backend.open(slab_path(root, number))
        try:
            _slab_header(file, number)
        finally:
            file.close()


def _unlink_index(path: str) -> None:
    """Remove an index. The log goes last: without it the file beside it could look sound."""
    for name in (path, path + "-wal", path + "-shm"):
        if os.path.exists(name):
            os.unlink(name)


def _fill(index: Index, root: str, backend: Backend) -> int:
    newest: dict[tuple[bytes, bytes], int] = {}
    """Write time of each block, by fingerprint and identity."""
    models: dict[bytes, int] = {}
    pending: list[Row] = []
    for number in slab_numbers(root):
        file = backend.open(slab_path(root, number))
        try:
            slab = _slab_header(file, number)
            if slab is None:
                continue
            index.add_slab(slab)
            for slot in range(slab.slots):
                header = _slot_header(file, slab, slot)
                if header is None:
                    continue
                key = (header.fingerprint, header.block_id)
                if newest.get(key, -1) >= header.created:
                    continue
                newest[key] = header.created
                pending = [row for row in pending if row.block_id != header.block_id]
                pending.append(_row(index, models, slab, slot, header))
                if len(pending) == ROWS_PER_COMMIT:
                    index.insert(pending)
                    pending = []
        finally:
            file.close()
    if pending:
        index.insert(pending)
    return len(newest)


def _row(
    index: Index, models: dict[bytes, int], slab: SlabHeader, slot: int, header: SlotHeader
) -> Row:
    if header.fingerprint not in models:
        models[header.fingerprint] = index.register_model(
            header.fingerprint, RECOVERED_LABEL, (), slab.slot_bytes, header.created
        )
    return Row(
        models[header.fingerprint],
        header.block_id,
        index.namespace(header.label),
        slab.slab,
        slot,
        header.created,
        header.created,
        0,
    )


def _slab_header(file: File, number: int) -> SlabHeader | None:
    """None when it is damaged. Raises UnknownVersion: such a slab is never removed as an orphan."""
    try:
        header = read_slab_header(file)
    except (FormatError, OSError) as error:
        logger.warning("slab %d cannot be used: %s", number, error)
        return None
    return header if header.slab == number else None


def _slot_header(file: File, slab: SlabHeader, slot: int) -> SlotHeader | None:
    offset = slab.offset(slot)
    try:
        header = read_header(lambda buffers, at: file.read(buffers, offset + at))
    except (Damaged, OSError):
        return None  # free, torn or unreadable: nothing to serve
    return header if header.names_its_tokens() else None
