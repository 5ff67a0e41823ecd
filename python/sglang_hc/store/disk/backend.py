"""The one small interface between the store and the file system.

Everything the store does to block files goes through `DirectBackend` and `File`, so that tests can
put power cuts, torn writes, full disks, I/O errors and slow disks in between. Errors are OSError
with errno. All calls may come from several threads at once; a file is written by who made it, and
never again once it has a block's name.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Protocol

from sglang_hc.forms import CHUNK_ALIGN

logger = logging.getLogger(__name__)

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The disk, or what this user may have of it, is used up."""


class File(Protocol):
    """One open file. Offsets, lengths and addresses of reads and writes are multiples of
    CHUNK_ALIGN; a call takes at most 1024 buffers."""

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers from `offset`. Returns the bytes read: fewer only at the end of file."""

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all bytes or raise."""

    def close(self) -> None:
        """Give the file back."""


def aligned_buffer(size: int) -> memoryview:
    """Zeroed page-aligned memory that O_DIRECT can use as it is."""
    return memoryview(mmap.mmap(-1, size))


def make_folders(path: str) -> None:
    """Make a folder, and those above it, where they are missing. Raises OSError."""
    if not os.path.isdir(path):
        make_folders(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)


class DirectBackend:
    """Files in the operating system's file systems, read and written with O_DIRECT if `direct`."""

    def __init__(self, direct: bool = True) -> None:
        self.direct = direct

    def open(self, path: str) -> File:
        """Open for reading."""
        return self._open(path, os.O_RDONLY)

    def create(self, path: str) -> File:
        """Make a new file, for reading and writing; fails if it is there."""
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def reuse(self, path: str) -> File:
        """Open a file that is there for writing over it."""
        return self._open(path, os.O_RDWR)

    def _open(self, path: str, flags: int) -> File:
        flags |= os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        try:
            return DirectFile(os.open(path, flags, FILE_MODE))
        except OSError as error:
            if error.errno == errno.EINVAL and os.path.isdir(path):  # what O_DIRECT says of it
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from None
            raise

    def rename(self, path: str, target: str) -> None:
        """Give a file or a folder another name, in place of a file that has it. Folders above it
        are made where they are missing."""
        try:
            os.rename(path, target)
        except FileNotFoundError:
            os.stat(path)
            make_folders(os.path.dirname(target))
            os.rename(path, target)

    def unlink(self, path: str) -> None:
        """Remove a file, or what somebody put in its place."""
        try:
            os.unlink(path)
        except IsADirectoryError:
            shutil.rmtree(path)

    def last_use(self, path: str) -> int:
        """When a block was used last: the time of change of its file, in ns since 1970."""
        return os.stat(path).st_mtime_ns

    def note_use(self, path: str, when: int) -> None:
        """Change what `last_use` says."""
        os.utime(path, ns=(when, when))

    def free_bytes(self, path: str) -> int:
        """Room that the file system has for this user."""
        disk = os.statvfs(path)
        return disk.f_bavail * disk.f_frsize

    def sync_directory(self, path: str) -> None:
        """Make creations, renames and removals in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class DirectFile:
    """`File` on a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        done = os.preadv(self._descriptor, buffers, offset)
        wanted = sum(map(len, buffers))
        while 0 < done < wanted and not done % CHUNK_ALIGN:  # interrupted, not the end of file
            more = os.preadv(self._descriptor, _skip(buffers, done), offset + done)
            if not more:
                break
            done += more
        return done

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        rest = list(buffers)
        while rest:
            wrote = os.pwritev(self._descriptor, rest, offset)
            if wrote <= 0:
                raise OSError(errno.EIO, "the disk accepted no bytes")
            rest = _skip(rest, wrote)
            offset += wrote

    def close(self) -> None:
        os.close(self._descriptor)


def probe_direct(path: str) -> bool:
    """Whether a file of this name can be written and read with O_DIRECT; says so when not.

    Raises OSError when it cannot be written at all, but not where there is no room.
    """
    page = aligned_buffer(CHUNK_ALIGN)
    try:
        with closing(DirectBackend().create(path)) as file:
            file.write([page], 0)
            return file.read([page], 0) == CHUNK_ALIGN
    except OSError as error:
        if error.errno in FULL:  # by blocks as a rule, which will make room
            return True
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        folder = os.path.dirname(path)
        logger.warning("%s: O_DIRECT refused (%s); using the page cache", folder, error)
        return False
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


class ThreadMemory(threading.local):
    """Aligned memory that each thread has for itself and uses again."""

    def __init__(self) -> None:
        self._memory = aligned_buffer(CHUNK_ALIGN)

    def get(self, size: int) -> memoryview:
        """`size` bytes that hold anything, until this thread asks again."""
        if len(self._memory) < size:
            self._memory = aligned_buffer(size)
        return self._memory[:size]


def _skip(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after their first `count` bytes."""
    rest = []
    for buffer in buffers:
        if count >= len(buffer):
            count -= len(buffer)
        else:
            rest.append(buffer[count:])
            count = 0
    return rest
