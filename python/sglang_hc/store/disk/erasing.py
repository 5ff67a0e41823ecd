"""Erasing: what was stored is in no file any more, and no later start can find it again.

Removal is made durable: the folders are synced. Bytes that a file had are the device's to give
away; who must not find them there encrypts it (docs/security.md). Beside
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
from sglang_hc.store.disk.folders import GONE, ModelFolder, cleared_folders, model_folders
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
    looked = {directory: _candidates(directory, what) for directory in directories}
    found = {directory: some for directory, some in looked.items() if some is not None}
    known = {
        one.header.block_id: Stored(one.header.parent_id, one.header.position, one.header.tokens)
        for some in found.values()
        for one in some
        if one.header is not None
    }
    blocks, complete = 0, len(found) == len(looked)
    for directory, some in found.items():
        count, done = _erase(directory, [one for one in some if _is_named(one, what, known)])
        blocks, complete = blocks + count, complete and done
    return Erased(blocks, complete)


def clear(directories: Sequence[Directory], is_writing: Callable[[], bool]) -> Erased:
    """Erase every block of the model that the directories are open for. is_writing: whether
    something is still being written that is to go."""
    end = time.monotonic() + WRITES_S
    while is_writing() and time.monotonic() < end:
        time.sleep(0.001)
    blocks, complete = 0, not is_writing()
    for directory in directories:
        count, done = _clear(directory)
        blocks, complete = blocks + count, complete and done
    return Erased(blocks, complete)


def remove_cleared(directory: Directory) -> None:
    """Remove the files of what was cleared. Raises OSError."""
    for folder in cleared_folders(directory.root):
        _remove_tree(folder)


def _remove_tree(folder: str) -> None:
    """Another server may be at it too. Raises OSError."""
    end = time.monotonic() + WRITES_S
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        if time.monotonic() >= end:
            raise OSError(errno.ENOTEMPTY, "cannot be removed", folder)
        time.sleep(0.01)


def _clear(directory: Directory) -> Erased:
    """One rename, and nothing is found any more, by whomever."""
    asked, count = directory.clearing, 0
    gone = os.path.join(directory.root, f"{GONE}{os.urandom(8).hex()}")
    try:
        _check_answers(directory)
        count = sum(1 for _ in directory.folder.block_ids())
        with suppress(FileNotFoundError):  # nothing was stored since the last time
            directory.backend.rename(directory.folder.path, gone)
        directory.backend.sync_directory(directory.root)
        remove_cleared(directory)
        directory.backend.sync_directory(directory.root)
        directory.ledger.recount()
    except OSError as error:
        return Erased(count, _missed(directory, error))
    directory.clearing -= asked
    return Erased(count, True)


def _candidates(directory: Directory, what: Forgetting) -> list[_Found] | None:
    """Blocks whose label, which may be cut off, may be one that is forgotten, and those that cannot
    be read; None where that cannot be found out."""
    try:
        _check_answers(directory)
        directory.membership.look()  # what dead servers were writing goes too
        return [
            found
            for folder in model_folders(directory.root)
            for block_id in folder.block_ids()
            if (found := _candidate(directory, folder, block_id, what)) is not None
        ]
    except OSError as error:
        _missed(directory, error)
        return None


def _candidate(
    directory: Directory, folder: ModelFolder, block_id: bytes, what: Forgetting
) -> _Found | None:
    """Raises OSError."""
    try:
        with closing(directory.backend.open(folder.block_path(block_id))) as file:
            header = read_header(file.read)
    except Damaged:
        return _Found(folder, block_id, None)
    except FileNotFoundError:
        return None
    named = header.block_id != block_id or what.may_name(header.label, LABEL_MAX)
    return _Found(folder, block_id, header) if named else None


def _check_answers(directory: Directory) -> None:
    if directory.hangs:
        raise TimeoutError("it does not answer")


def _is_named(one: _Found, what: Forgetting, known: dict[bytes, Stored]) -> bool:
    """Whether a candidate is forgotten. What cannot be read, or is another block, is."""
    if one.header is None or one.header.block_id != one.block_id:
        return True
    return what.names_block(one.header.label, known[one.block_id], known)


def _erase(directory: Directory, some: Sequence[_Found]) -> Erased:
    """Erase these blocks of one directory."""
    count = 0
    try:
        _check_answers(directory)
        for folder, block_id, _ in some:
            if folder == directory.folder:
                directory.forget(block_id)
            count += _unlink(directory, folder, block_id)
        _sync(directory)
    except OSError as error:
        return Erased(count, _missed(directory, error))
    return Erased(count, True)


def _unlink(directory: Directory, folder: ModelFolder, block_id: bytes) -> bool:
    """Whether there was such a file. Raises OSError."""
    try:
        directory.backend.unlink(folder.block_path(block_id))
    except FileNotFoundError:
        return False
    directory.ledger.give_back(folder.file_bytes)
    return True


def _sync(directory: Directory) -> None:
    """Make all removals durable, of blocks that were evicted before too. Raises OSError."""
    leaves = [leaf for folder in model_folders(directory.root) for leaf in folder.leaves()]
    for path in (os.path.join(directory.root, NEW), *leaves):
        with suppress(FileNotFoundError):
            directory.backend.sync_directory(path)


def _missed(directory: Directory, error: Exception) -> bool:
    """Something could not be erased: False."""
    directory.count("erasing_failed")
    logger.error("%s: not everything could be erased: %s", directory.root, error)
    return False
