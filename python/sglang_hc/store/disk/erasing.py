"""Erasing: what was stored is in no file any more, and no later start can find it again.

A block that is evicted leaves its bytes in its slot until the slot has another owner, and an index
that is rebuilt finds it there. What is erased here is overwritten:

1. the rows of the blocks go, and their slots stay taken
2. their slots are overwritten with zeros, and so is every slot that no block owns and that is not
   blank: it may hold what was evicted, replaced, damaged or never finished
3. the slabs are synced
4. the index forgets namespaces without a block, and its log is written out, synced and emptied

A crash before the end leaves some of it erased. Beside the erasing the store serves as ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.disk.backend import aligned_buffer
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.format import LABEL_MAX, Damaged, SlotHeader, read_header
from sglang_hc.store.disk.index import NAMESPACE_BYTES, ROWS_PER_COMMIT
from sglang_hc.store.disk.index_file import IndexDamaged, IndexFull, Place, Row
from sglang_hc.tree.forgetting import Forgetting, Stored

logger = logging.getLogger(__name__)

IN_USE_S = 60.0
"""How long erasing waits for a slot that somebody reads or writes."""

_ZEROS = aligned_buffer(1 << 20)
_TROUBLE = (OSError, IndexFull, IndexDamaged, KeyError)
"""What a directory may say that fails, or whose slab has just been dropped."""


class Erased(NamedTuple):
    """blocks: how many were there. complete: everything was reached, and is gone for good."""

    blocks: int
    complete: bool


class _Found(NamedTuple):
    """A block that may have to go. header: None where it cannot be read."""

    row: Row
    header: SlotHeader | None


def forget(directories: Sequence[Directory], what: Forgetting) -> Erased:
    """Erase the blocks of some namespaces, of every model. None of them may be on its way to the
    disk. A directory that cannot be read or written is left as it is, and the answer says so."""
    found = {directory: _candidates(directory, what) for directory in directories}
    known = {
        header.block_id: Stored(header.parent_id, header.position, header.tokens)
        for some in found.values()
        for _, header in some or ()
        if header is not None
    }
    blocks, complete = 0, None not in found.values()
    for directory, some in found.items():
        rows = [one.row for one in some or () if _is_named(one.header, what, known)]
        count, done = _erase(directory, rows)
        blocks, complete = blocks + count, complete and done
    return Erased(blocks, complete)


def clear(forgotten: Mapping[Directory, Mapping[bytes, int]]) -> Erased:
    """Erase every block of the model that the directories are open for: what `Directory.forget`
    gave of each. Slabs that no other model has a block in are removed as files."""
    blocks, complete = 0, True
    for directory, places in forgotten.items():
        names = places.items()
        rows = [Row(directory.number, name, *Place.unpack(packed)) for name, packed in names]
        count, done = _erase(directory, rows, whole_slabs=True)
        if not done:
            directory.unerased |= places  # for who tries again
        blocks, complete = blocks + count, complete and done
    return Erased(blocks, complete)


def _candidates(directory: Directory, what: Forgetting) -> list[_Found] | None:
    """Blocks whose label in the index, which is cut off, may be one that is forgotten; None where
    that cannot be found out."""
    found = []
    try:
        with directory.guarded():
            labels = directory.index.namespaces()
            named = {n for n, label in labels.items() if what.may_name(label, NAMESPACE_BYTES)}
            rows = list(directory.index.rows_of(named)) if named else []
        for row in rows:
            if directory.slabs.lease(row.place):
                try:
                    found.append(_Found(row, _header(directory, row)))
                finally:
                    directory.slabs.unlease([row.place])
    except _TROUBLE as error:
        _missed(directory, error)
        return None
    return found


def _header(directory: Directory, row: Row) -> SlotHeader | None:
    """What the slot of a block says of it; None for nothing that can be believed."""
    try:
        header = read_header(partial(directory.slabs.read, row.place))
    except Damaged:
        return None
    return header if header.block_id == row.block_id else None


def _is_named(header: SlotHeader | None, what: Forgetting, known: Mapping[bytes, Stored]) -> bool:
    """Whether a candidate is forgotten. What cannot be read is."""
    if header is None:
        return True
    return what.may_name(header.label, LABEL_MAX) and what.names_block(
        header.label, known[header.block_id], known
    )


def _erase(directory: Directory, rows: Sequence[Row], *, whole_slabs: bool = False) -> Erased:
    """Erase these blocks of one directory, and what earlier blocks left behind. whole_slabs: remove
    the slabs that are empty then."""
    count, slabs = 0, directory.slabs
    touched: set[int] = set()
    if directory.hangs:
        return Erased(0, _missed(directory, TimeoutError("it does not answer")))
    try:
        for some in _batches(rows):
            places = directory.disown(some)
            count += len(places)
            if whole_slabs:
                slabs.release(places)
            else:
                _overwrite(directory, [place for place in places if slabs.lease(place)], touched)
        if whole_slabs:
            _drop_empty(directory)
        _sweep(directory, touched)
        slabs.sync(touched & slabs.sizes().keys())
        with directory.guarded():
            directory.index.settle()
    except _TROUBLE as error:
        return Erased(count, _missed(directory, error))
    return Erased(count, True)


def _drop_empty(directory: Directory) -> None:
    """Remove the slabs in which no slot is taken."""
    with directory.guarded():
        for slab in directory.index.slabs():
            if len(directory.slabs.unowned(slab.slab)) == slab.slots:
                directory.slabs.drop(slab.slab)


def _sweep(directory: Directory, touched: set[int]) -> None:
    """Overwrite every slot that no block owns and that is not blank. Those in use are waited for:
    whoever writes one may fail, and leave in it what was there before."""
    slabs = directory.slabs
    in_use = slabs.leased()
    for number in slabs.sizes():
        for some in _batches(slabs.unowned(number)):
            in_use |= _claim_and_overwrite(directory, some, touched)
    end = time.monotonic() + IN_USE_S
    while in_use & slabs.leased():
        if time.monotonic() >= end:
            raise TimeoutError("a slot is in use and cannot be erased now")
        time.sleep(0.001)
    for some in _batches(sorted(in_use)):
        _claim_and_overwrite(directory, some, touched)


def _claim_and_overwrite(
    directory: Directory, places: Sequence[Place], touched: set[int]
) -> set[Place]:
    """Returns those that are in use now."""
    mine, in_use = directory.slabs.claim(places)
    _overwrite(directory, mine, touched, blank_too=False)
    return in_use


def _overwrite(
    directory: Directory, places: Sequence[Place], touched: set[int], *, blank_too: bool = True
) -> None:
    """Write zeros to leased slots that belong to nobody else, and give them back. Their slabs are
    added to `touched`. A slot that cannot be overwritten is not used again before a restart.
    blank_too: also where a slot has no header. Raises OSError."""
    slabs = directory.slabs
    page = aligned_buffer(CHUNK_ALIGN)
    try:
        for place in places:
            if not blank_too:
                slabs.read(place, [page])
                if not np.frombuffer(page, dtype=np.uint8).any():
                    continue
            size = slabs.sizes()[place.slab]
            whole, rest = divmod(size, len(_ZEROS))
            slabs.write(place, [_ZEROS] * whole + [_ZEROS[:rest]] * bool(rest))
            touched.add(place.slab)
    except OSError:
        for place in places:
            slabs.quarantine(place)
        raise
    finally:
        slabs.release(places)
        slabs.unlease(places)


T = TypeVar("T")


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while some := list(islice(rest, ROWS_PER_COMMIT)):
        yield some


def _missed(directory: Directory, error: Exception) -> bool:
    """Something could not be erased: False."""
    directory.count("erasing_failed")
    logger.error("%s: not everything could be erased: %s", directory.root, error)
    return False
