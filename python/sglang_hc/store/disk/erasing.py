"""Erasing: what was stored is in no file any more, and no later start can find it again.

Removal is made durable: the folders that files were removed from are synced. Bytes that a file had
are the device's to give away; who must not find them there encrypts it (docs/security.md). Beside
the erasing the store serves as ever.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.folders import (
    ModelFolder,
    cleared_folders,
    cleared_name,
    model_folders,
)
from sglang_hc.store.disk.format import LABEL_MAX, BlockHeader, Damaged, read_header
from sglang_hc.store.disk.sharing import NEW
from sglang_hc.tree.forgetting import Forgetting, Stored

logger = logging.getLogger(__name__)

WRITES_S = 60.0
"""How long clearing waits for what is being written."""


class Erased(NamedTuple):
    """blocks: how many were there. complete: everything was reached, and is gone for good."""

    blocks: int
    complete: bool


class _Found(NamedTuple):
    """A block that may have to go. header: None where it cannot be read."""

    folder: ModelFolder
    block_id: bytes
    header: BlockHeader | None


def forget(directories: Sequence[Directory], what: Forgetting) -> Erased:
    """Erase the blocks of some namespaces, of every model. None of them may be on its way to the
    disk. A directory that cannot be read or written is left as it is, and the answer says so."""
    found: dict[Directory, list[_Found]] = {}
    for directory in directories:
        some = _candidates(directory, what)
        if some is not None:
            found[directory] = some
    known = {
        one.header.block_id: Stored(one.header.parent_id, one.header.position, one.header.tokens)
        for some in found.values()
        for one in some
        if one.header is not None
    }
    blocks, complete = 0, len(found) == len(directories)
    for directory, some in found.items():
        count, done = _erase(directory, [one for one in some if _is_named(one, what, known)])
        blocks, complete = blocks + count, complete and done
    return Erased(blocks, complete)


def clear(directories: Sequence[Directory], is_writing: Callable[[], bool]) -> Erased:
    """Erase every block of the model that the directories are open for. is_writing: whether
    something is still being written that is to go."""
    asked = [directory.clearings for directory in directories]
    end = time.monotonic() + WRITES_S
    while is_writing() and time.monotonic() < end:
        time.sleep(0.001)
    blocks, complete = 0, not is_writing()
    for directory, clearings in zip(directories, asked, strict=True):
        count, done = _clear_unless_broken(directory, clearings)
        blocks, complete = blocks + count, complete and done
    return Erased(blocks, complete)


def clear_late(directory: Directory) -> None:
    """Erase what a clear could not: until then the directory takes nothing. Raises OSError."""
    _clear(directory, directory.clearings)
    directory.owes_clearing = False


def remove_cleared(directory: Directory) -> None:
    """Remove the files of what was cleared; another server may be at it too. Raises OSError."""
    for folder in cleared_folders(directory.root):
        for block_id in folder.block_ids():
            directory.unlink(folder, block_id)
        shutil.rmtree(folder.path, ignore_errors=True)
        if os.path.lexists(folder.path):
            raise OSError(errno.EIO, f"{folder.path} cannot be removed")


def _clear_unless_broken(directory: Directory, clearings: int) -> Erased:
    try:
        return Erased(_clear(directory, clearings), True)
    except OSError as error:
        directory.owes_clearing = directory.is_clearing  # or only files are left to be removed
        return Erased(0, _missed(directory, error))


def _clear(directory: Directory, clearings: int) -> int:
    """One rename, and nothing is found any more, by whomever. clearings: that this one does.
    Returns the blocks that were there. Raises OSError."""
    _check_answers(directory)
    count = sum(1 for _ in directory.folder.block_ids())
    with suppress(FileNotFoundError):
        directory.backend.rename(directory.folder.path, cleared_name(directory.folder).path)
    directory.backend.sync_directory(directory.root)
    directory.cleared = max(directory.cleared, clearings)
    remove_cleared(directory)
    directory.backend.sync_directory(directory.root)
    with suppress(OSError):
        directory.write_label()
    return count


def _candidates(directory: Directory, what: Forgetting) -> list[_Found] | None:
    """Blocks whose label, which may be cut off, may be one that is forgotten, and those that cannot
    be read. None for a directory that is out of order."""
    try:
        _check_answers(directory)
        directory.membership.look()  # what dead servers were writing goes too
        remove_cleared(directory)
        folders = model_folders(directory.root)
        every = (_look_at(directory, f, block_id) for f in folders for block_id in f.block_ids())
        return [one for one in every if one is not None and _may_be_named(one, what)]
    except OSError as error:
        _missed(directory, error)
        return None


def _look_at(directory: Directory, folder: ModelFolder, block_id: bytes) -> _Found | None:
    """None for a block that is gone. Raises OSError."""
    try:
        with closing(directory.backend.open(folder.block_path(block_id))) as file:
            return _Found(folder, block_id, read_header(file.read))
    except (Damaged, IsADirectoryError):
        return _Found(folder, block_id, None)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return _Found(folder, block_id, None)


def _may_be_named(one: _Found, what: Forgetting) -> bool:
    header = one.header
    return (
        header is None or header.block_id != one.block_id or what.may_name(header.label, LABEL_MAX)
    )


def _is_named(one: _Found, what: Forgetting, known: dict[bytes, Stored]) -> bool:
    """Whether a candidate is forgotten. What cannot be read, or is another block, is."""
    if one.header is None or one.header.block_id != one.block_id:
        return True
    return what.names_block(one.header.label, known[one.block_id], known)


def _erase(directory: Directory, some: Sequence[_Found]) -> Erased:
    """Erase these blocks of one directory. Several parts of a block are one block."""
    blocks = len({block_id for _, block_id, _ in some})
    try:
        for folder, block_id, _ in some:
            directory.unlink(folder, block_id)
        _sync(directory)
    except OSError as error:
        return Erased(blocks, _missed(directory, error))
    return Erased(blocks, True)


def _sync(directory: Directory) -> None:
    """Make all removals durable, of blocks that were evicted before too. Raises OSError."""
    leaves = (leaf for folder in model_folders(directory.root) for leaf, _ in folder.leaves())
    for path in (os.path.join(directory.root, NEW), *leaves):
        with suppress(FileNotFoundError):  # nothing was stored there, or another server cleared it
            directory.backend.sync_directory(path)


def _check_answers(directory: Directory) -> None:
    """Raises TimeoutError for a directory that hangs: whoever asks it does not come back."""
    if directory.hangs:
        raise TimeoutError("it does not answer")


def _missed(directory: Directory, error: Exception) -> bool:
    """Something could not be erased: False."""
    directory.count("erasing_failed")
    logger.error("%s: not everything could be erased: %s", directory.root, error)
    return False
