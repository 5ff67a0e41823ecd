"""Erasing: what was stored is in no file any more, and no later start can find it again.

Removal is made durable: the folders that files were removed from are synced. Bytes that a file had
are the device's to give away; who must not find them there encrypts it (docs/security.md). Beside
the erasing the store serves as ever.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.folders import GONE, ModelFolder, cleared_folders, model_folders
from sglang_hc.store.disk.format import LABEL_MAX, BlockHeader, Damaged, read_header
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
    complete = True
    for directory in directories:
        try:
            directory.membership.look()  # what dead servers were writing goes too
            found[directory] = [*_candidates(directory, what)]
        except OSError as error:
            complete = _missed(directory, error)
    known = {
        one.header.block_id: Stored(one.header.parent_id, one.header.position, one.header.tokens)
        for some in found.values()
        for one in some
        if one.header is not None
    }
    blocks = 0
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
        try:
            blocks += _clear(directory)
            directory.clearing -= 1
        except OSError as error:
            complete = _missed(directory, error)
    return Erased(blocks, complete)


def remove_cleared(directory: Directory) -> None:
    """Remove the files of what was cleared. Raises OSError."""
    for folder in cleared_folders(directory.root):
        shutil.rmtree(folder)


def _clear(directory: Directory) -> int:
    """One rename, and nothing is found any more, by whomever. Returns the blocks that were there.
    Raises OSError."""
    if directory.hangs:
        raise TimeoutError("it does not answer")
    gone = os.path.join(directory.root, f"{GONE}{os.urandom(8).hex()}")
    try:
        directory.backend.rename(directory.folder.path, gone)
    except FileNotFoundError:
        return 0
    directory.backend.sync_directory(directory.root)
    count = sum(1 for _ in directory.folder._replace(path=gone).block_ids())
    remove_cleared(directory)
    directory.backend.sync_directory(directory.root)
    directory.ledger.give_back(count * directory.folder.file_bytes)
    return count


def _candidates(directory: Directory, what: Forgetting) -> Iterator[_Found]:
    """Blocks whose label, which may be cut off, may be one that is forgotten, and those that cannot
    be read. Raises OSError."""
    for folder in model_folders(directory.root):
        for block_id in folder.block_ids():
            try:
                with closing(directory.backend.open(folder.block_path(block_id))) as file:
                    header = read_header(file.read)
            except Damaged:
                yield _Found(folder, block_id, None)
            except FileNotFoundError:
                continue
            else:
                if header.block_id != block_id or what.may_name(header.label, LABEL_MAX):
                    yield _Found(folder, block_id, header)


def _is_named(one: _Found, what: Forgetting, known: dict[bytes, Stored]) -> bool:
    """Whether a candidate is forgotten. What cannot be read, or is another block, is."""
    if one.header is None or one.header.block_id != one.block_id:
        return True
    return what.names_block(one.header.label, known[one.block_id], known)


def _erase(directory: Directory, some: Sequence[_Found]) -> Erased:
    """Erase these blocks of one directory."""
    count, freed = 0, 0
    folders: set[str] = set()
    try:
        if directory.hangs:
            raise TimeoutError("it does not answer")
        for folder, block_id, _ in some:
            if folder == directory.folder:
                directory.forget(block_id)
            path = folder.block_path(block_id)
            try:
                directory.backend.unlink(path)
            except FileNotFoundError:
                continue
            count, freed = count + 1, freed + folder.file_bytes
            folders.add(os.path.dirname(path))
        for path in folders:
            directory.backend.sync_directory(path)
        directory.ledger.give_back(freed)
    except OSError as error:
        return Erased(count, _missed(directory, error))
    return Erased(count, True)


def _missed(directory: Directory, error: Exception) -> bool:
    """Something could not be erased: False."""
    directory.count("erasing_failed")
    logger.error("%s: not everything could be erased: %s", directory.root, error)
    return False
