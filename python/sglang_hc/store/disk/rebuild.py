"""A new index from the slot headers, when the old one is missing or malformed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, suppress

from sglang_hc.store.disk import index_file
from sglang_hc.store.disk.backend import DirectBackend, File
from sglang_hc.store.disk.format import Damaged, FormatError, SlabHeader, SlotHeader, read_header
from sglang_hc.store.disk.index import ROWS_PER_COMMIT, Index
from sglang_hc.store.disk.index_file import IndexDamaged, IndexFull, NewRow
from sglang_hc.store.disk.slabs import read_slab_header, slab_numbers, slab_path

logger = logging.getLogger(__name__)

RECOVERED_LABEL = "(recovered)"


def rebuild_index(root: str, path: str, backend: DirectBackend) -> int:
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
    with suppress(FileNotFoundError):
        if os.path.getsize(fresh + "-wal"):  # the file alone would be an index without slabs
            raise IndexFull("the new index could not be written out of its log")
    os.rename(fresh, path)
    backend.sync_directory(root)
    return count


def _refuse_other_versions(root: str, path: str, backend: DirectBackend) -> None:
    """Raises UnknownVersion if the index or a slab was written by another version."""
    if os.path.exists(path):
        with suppress(IndexDamaged, IndexFull):
            Index(path).close()
    for number in slab_numbers(root):
        with closing(backend.open(slab_path(root, number))) as file, suppress(FormatError, OSError):
            read_slab_header(file)


def _unlink_index(path: str) -> None:
    """Remove an index. The log goes last: without it the file beside it could look sound."""
    for name in (path, path + "-wal", path + "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(name)


def _fill(index: Index, root: str, backend: DirectBackend) -> int:
    newest: dict[tuple[bytes, bytes], int] = {}
    """Write time of each block, by fingerprint and identity."""
    pending: dict[tuple[bytes, bytes], NewRow] = {}
    models: dict[bytes, int] = {}
    for slab, slot, header in _slots(index, root, backend):
        key = (header.fingerprint, header.block_id)
        if newest.get(key, -1) >= header.created:
            continue
        newest[key] = when = header.created
        if header.fingerprint not in models:
            models[header.fingerprint] = index.register_model(
                header.fingerprint, RECOVERED_LABEL, (), slab.slot_bytes, when
            )
        owner = (models[header.fingerprint], header.block_id, header.label)
        pending[key] = NewRow(*owner, slab.slab, slot, when, when)
        if len(pending) == ROWS_PER_COMMIT:
            index.insert([*pending.values()])
            pending.clear()
    if pending:
        index.insert([*pending.values()])
    return len(newest)


def _slots(
    index: Index, root: str, backend: DirectBackend
) -> Iterator[tuple[SlabHeader, int, SlotHeader]]:
    """All slots that say what they hold. Their slabs are added to the index."""
    for number in slab_numbers(root):
        with closing(backend.open(slab_path(root, number))) as file:
            try:
                slab = read_slab_header(file)
            except (FormatError, OSError) as error:
                logger.warning("slab %d cannot be used: %s", number, error)
                continue
            if slab.slab != number:
                continue
            index.add_slab(slab)
            for slot in range(slab.slots):
                header = _slot_header(file, slab.offset(slot))
                if header is not None:
                    yield slab, slot, header


def _slot_header(file: File, offset: int) -> SlotHeader | None:
    try:
        header = read_header(lambda buffers, at: file.read(buffers, offset + at))
    except (Damaged, OSError):
        return None  # free, torn or unreadable: nothing to serve
    return header if header.names_its_tokens() else None
