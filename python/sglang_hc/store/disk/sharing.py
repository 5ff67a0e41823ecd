"""What servers share that have one directory open: the bytes that its files take, and who they are.

    lock            held by whoever makes room or takes it; text: bytes taken
    servers/NAME    locked by a server as long as it lives
    new/NAME-N-SIZE a block that a server is writing, and the bytes that it counts for

A lock belongs to a process and ends with it, so that nobody has to find out who is dead: what a
server was writing when it ended is removed, and counted no more, by the next that looks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sglang_hc.store.disk.backend import DIRECTORY_MODE, FILE_MODE

LOCK_NAME = "lock"
SERVERS = "servers"
NEW = "new"
_NUMBER_BYTES = 20

LOCK_S = 10.0
"""Longest that somebody waits for the lock: a server that is stopped may hold it for ever. To count
the files of a large directory may take seconds. A write that fails may wait twice, which must not
look like a disk that hangs (`threads.Patience`)."""

_LONGEST_NAP_S = 0.002


class LockTimeout(TimeoutError):
    """A directory's lock did not come within LOCK_S: it is busy, which is no failure of its
    disk."""

    def __init__(self) -> None:
        super().__init__(errno.ETIMEDOUT, "another server does not give its lock back")


class Ledger:
    """Bytes that the files of a directory take, those being written included. Thread-safe.

    Files are counted before they are made and until they are removed, both while the ledger is
    held, so that whoever is killed in between leaves the number too large, never too small. What is
    wrong in it costs room, or a count of all files, and never a block.
    """

    def __init__(self, root: str) -> None:
        """Raises OSError."""
        self._path = os.path.join(root, LOCK_NAME)
        self._file = self._open()
        self._mine = threading.Lock()

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other thread and no other server is in here. Raises LockTimeout, and OSError."""
        end = time.monotonic() + LOCK_S
        if not self._mine.acquire(timeout=LOCK_S):
            raise LockTimeout
        try:
            self._lock(end)
            try:
                while not os.fstat(self._file).st_nlink:  # removed: others have another one
                    self._open_again(end)
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._mine.release()

    def _lock(self, end: float) -> None:
        nap = 0.00005
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() >= end:
                raise LockTimeout
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    def _open_again(self, end: float) -> None:
        fresh, old = self._open(), self._file
        self._file = fresh
        os.close(old)
        self._lock(end)

    @property
    def used(self) -> int | None:
        """Bytes taken; None where that has to be counted. Only while held. Raises OSError."""
        text = os.pread(self._file, _NUMBER_BYTES + 1, 0)
        if text.isdigit() and len(text) == _NUMBER_BYTES:
            return int(text)
        os.ftruncate(self._file, 0)
        return None

    @used.setter
    def used(self, size: int) -> None:
        os.pwrite(self._file, b"%0*d" % (_NUMBER_BYTES, max(0, size)), 0)

    def freed(self, size: int) -> None:
        """A file of so many bytes was removed. Only while held. Raises OSError."""
        used = self.used
        if used is not None:
            self.used = used - size

    def close(self) -> None:
        os.close(self._file)


class Membership:
    """This server among those that have a directory open.

    name: in this directory, of no other server. alone: whether there was no other when it was last
    looked.
    """

    def __init__(self, root: str, ledger: Ledger) -> None:
        """Raises OSError."""
        self._root = root
        self._ledger = ledger
        self.alone = True
        self.name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._path = os.path.join(root, SERVERS, self.name)
        with ledger.held():  # nobody may find the file before it is locked
            self._file = self._enter()

    def _make_folders(self) -> None:
        for folder in (SERVERS, NEW):
            with suppress(FileExistsError):
                os.mkdir(os.path.join(self._root, folder), DIRECTORY_MODE)

    def _enter(self) -> int:
        self._make_folders()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(self._path, flags, FILE_MODE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except BaseException:
            os.close(file)
            raise
        return file

    def look(self) -> None:
        """See who is there, and remove what those left behind that are not. Raises OSError."""
        with self._ledger.held():
            self._make_folders()
            if not os.fstat(self._file).st_nlink:  # removed by hand: others take this one for dead
                old, self._file = self._file, self._enter()
                os.close(old)
            self.alone = True
            living = {self.name}
            for name in os.listdir(os.path.join(self._root, SERVERS)):
                if name != self.name and _lives(os.path.join(self._root, SERVERS, name)):
                    living.add(name)
                    self.alone = False
            self._remove_unfinished(living)

    def _remove_unfinished(self, living: set[str]) -> None:
        folder = os.path.join(self._root, NEW)
        for name in os.listdir(folder):
            server, size = _server_and_size(name)
            if server not in living:
                with suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(os.path.join(folder, name))
                    self._ledger.freed(size)

    def path_of(self, number: int, size: int) -> str:
        """Of a file that this server is writing."""
        return os.path.join(self._root, NEW, f"{self.name}-{number}-{size}")

    def close(self) -> None:
        with suppress(OSError):
            os.unlink(self._path)
        os.close(self._file)


def living_servers(root: str) -> list[str]:
    """Process ids, as their hosts know them, of the servers that have a directory open."""
    folder = os.path.join(root, SERVERS)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    living = {name.partition("-")[0] for name in names if _is_locked(os.path.join(folder, name))}
    return sorted(living, key=int)


def unfinished_bytes(root: str) -> int:
    """That blocks count for that are being written."""
    return sum(_server_and_size(name)[1] for name in os.listdir(os.path.join(root, NEW)))


def _server_and_size(name: str) -> tuple[str, int]:
    """What the name of a file in `new` says; ("", 0) for a name that no server gave."""
    found = re.fullmatch(r"([0-9]+-[0-9a-f]+)-[0-9]+-([0-9]{1,18})", name)
    return (found[1], int(found[2])) if found else ("", 0)


def _lives(path: str) -> bool:
    """Whether a server's file is locked; removed where it is not. While the ledger is held."""
    if _is_locked(path):
        return True
    with suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(path)
    return False


def _is_locked(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
