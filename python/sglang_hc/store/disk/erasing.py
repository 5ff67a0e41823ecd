"""Erasing: what was stored is in no file any more, and no later start can find it again.

Removal is made durable: the folders that files were removed from are synced. Bytes that a file had
are the device's to give away; who must not find them there encrypts it (docs/security.md). Beside
the erasing the store serves as ever.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.folders import ModelFolder, model_folders
from sglang_hc.store.disk.format import LABEL_MAX, BlockHeader, Damaged, read_header
from sglang_hc.store.disk.sharing import NEW, LockTimeout
from sglang_hc.tree.forgetting import Forgetting, Stored

logger = logging.getLogger(__name__)


class Erased(NamedTuple):
    """blocks: how many were there. complete: everything was reached, and is gone for good."""

    blocks: int
    complete: bool


class _Found(NamedTuple):
    """A block that may have to go. header: None where it has none that could say that it stays."""

    folder: ModelFolder
    block_id: bytes
    header: BlockHeader | None


def erase(directories: Sequence[Directory], what: Forgetting | None) -> Erased:
    """Erase the blocks of some namespaces, of every model; None: all blocks of the model that the
    directories are open for. None of them may be on its way to the disk. A directory that cannot be
    read or written may keep some, and the answer says so."""
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
        gone = [
            one
            for one in some
            if what is None
            or one.header is None
            or what.names_block(one.header.label, known[one.block_id], known)
        ]
        count, done = _erase(directory, gone)
        blocks, complete = blocks + count, complete and done
    return Erased(blocks, complete)


def _candidates(directory: Directory, what: Forgetting | None) -> list[_Found] | None:
    """Blocks whose label, which may be cut off, may be one that is forgotten, and those that cannot
    be read; or all. None for a directory that is out of order."""
    try:
        _check_answers(directory)
        directory.membership.look()  # what dead servers were writing goes too
        if what is None:
            names = {*directory.folder.block_ids(), *directory.blocks.copy()}
            return [_Found(directory.folder, block_id, None) for block_id in names]
        known = directory.blocks.copy()
        files = [(f, name) for f in model_folders(directory.root) for name in f.block_ids()]
        # Another store of this directory, that of ends or another server's, may have erased them.
        for name in known.keys() - {name for folder, name in files if folder == directory.folder}:
            if os.path.exists(directory.path(name)):  # stored again: it may be anybody's
                files.append((directory.folder, name))
            else:
                directory.forget(name)
        every = (_look_at(directory, *one) for one in files)
        return [
            one
            for one in every
            if one is not None
            and (one.header is None or what.may_name(one.header.label, LABEL_MAX))
        ]
    except OSError as error:
        _missed(directory, error)
        return None


def _look_at(directory: Directory, folder: ModelFolder, block_id: bytes) -> _Found | None:
    """None for a block that is gone. Raises OSError."""
    try:
        with closing(directory.backend.open(folder.block_path(block_id))) as file:
            header = read_header(file.read)
        return _Found(folder, block_id, header if header.block_id == block_id else None)
    except (Damaged, IsADirectoryError):
        return _Found(folder, block_id, None)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return _Found(folder, block_id, None)


def _erase(directory: Directory, some: Sequence[_Found]) -> Erased:
    """Erase these blocks of one directory. Several parts of a block are one block."""
    gone: set[bytes] = set()
    failure: OSError | None = None
    for folder, block_id, _ in some:
        try:
            if directory.unlink(folder, block_id):
                gone.add(block_id)
        except OSError as error:  # one that stays is no reason for others to stay
            failure = error
            if isinstance(error, LockTimeout):
                break  # the next one would wait as long
    try:
        _sync(directory)
    except OSError as error:
        failure = error
    if failure is not None:
        _missed(directory, failure)
    return Erased(len(gone), failure is None)


def _sync(directory: Directory) -> None:
    """Make all removals durable, of blocks that were evicted before too. Raises OSError."""
    leaves = (leaf for folder in model_folders(directory.root) for leaf, _ in folder.leaves())
    for path in (os.path.join(directory.root, NEW), *leaves):
        with suppress(FileNotFoundError):  # nothing was stored there
            directory.backend.sync_directory(path)


def _check_answers(directory: Directory) -> None:
    """Raises TimeoutError for a directory that hangs: whoever asks it does not come back."""
    if directory.hangs:
        raise TimeoutError("it does not answer")


def _missed(directory: Directory, error: OSError) -> None:
    """Something could not be erased."""
    directory.count("erasing_failed")
    logger.error("%s: not everything could be erased: %s", directory.root, error)
