"""Room for one more file in a directory, and what goes for it.

Where a block has to go, its file stays: it gets another name and is written over. File systems are
slow at making and removing files, and slower at making some where others have just gone. Other
servers may have used a block: its file says so, and is asked before it goes.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from sglang_hc.store.disk.backend import FULL, File
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.folders import ModelFolder, model_folders
from sglang_hc.store.disk.sharing import unfinished_bytes
from sglang_hc.store.disk.victims import PAGE, Victim, Victims

logger = logging.getLogger(__name__)


class Evictor:
    """Makes room in one directory.

    limit: bytes that the files may take: the budget, or less where the disk has no room for it.
    """

    def __init__(self, directory: Directory, uses: dict[bytes, float]) -> None:
        """uses: see `Victims`."""
        self._directory = directory
        self._size = directory.folder.file_bytes
        self._victims = Victims(directory, uses)
        self._doubts = False
        """Files are gone that this server alone would have removed: the ledger counts them."""
        self.limit = directory.budget

    def open(self) -> None:
        """Count what is there, and take less than the budget where the disk has less room. Raises
        OSError."""
        directory = self._directory
        with directory.ledger.held():
            own = len(directory.blocks) * self._size
            directory.ledger.used = used = own + self._count_files(besides=directory.folder)
        self.limit = self._room(used)
        if self.limit < directory.budget:
            logger.warning(
                "%s: the disk has room for %.1f of the %.1f GB of the budget; blocks are evicted "
                "when that is full",
                directory.root, self.limit / 1e9, directory.budget / 1e9,
            )  # fmt: skip

    def take(self, path: str) -> File | None:
        """Take room for one more block: the file at `path`, open and to be written over. None where
        nothing can go for it. Raises OSError, and has taken nothing then."""
        directory = self._directory
        with directory.making_room, directory.ledger.held():
            used, counted = self._used(), False
            while True:
                if used + self._size <= self.limit:
                    file = self._make_file(path, used)
                    if file is not None:
                        return file
                    continue  # less may be taken now
                victim = self._victims.next()
                if victim is None and counted:
                    return None
                if victim is None:  # what others stored can go, what somebody removed is free
                    directory.find_others()
                    directory.ledger.used = used = self._count_files()
                    counted = True
                elif victim.folder.file_bytes != self._size or used > self.limit:
                    used -= self._remove(victim)
                    directory.ledger.used = used
                elif self._take_file(victim, path):
                    return self._open_again(path, used)

    def disk_is_full(self) -> None:
        """The disk had no room for a file although the limit has. The room that was taken is given
        back, and less is taken from now on. Raises OSError."""
        directory = self._directory
        with directory.making_room, directory.ledger.held():
            directory.ledger.used = used = self._used() - self._size
            self._limit_to(used)

    def look_for_room(self) -> None:
        """The disk may have got more room, or less. Raises OSError."""
        with self._directory.ledger.held():
            used = self._used()
        self.limit = self._room(used)

    def expire(self, before: int) -> None:
        """Remove every block of this model last used before that time, in ns since 1970. Raises
        OSError."""
        directory = self._directory
        directory.learn_uses()
        directory.note_touches()
        freed = self._size
        while freed:
            oldest = [Victim(u, directory.folder, name) for name, u in directory.oldest(PAGE)]
            with directory.making_room, directory.ledger.held():
                used = self._used()
                freed = sum(self._remove(victim) for victim in oldest if victim.used < before)
                directory.ledger.used = used - freed
            directory.count("expired_blocks", freed // self._size)

    # -- while the ledger is held ----------------------------------------------------------------

    def _used(self) -> int:
        used = self._directory.ledger.used
        return self._count_files() if used is None or self._doubts else used

    def _count_files(self, besides: ModelFolder | None = None) -> int:
        """Bytes that all files take, by a look at their names. besides: a folder that is counted
        already."""
        root = self._directory.root
        unfinished = unfinished_bytes(root)  # first: what gets its name meanwhile counts twice
        folders = [one for one in model_folders(root) if one != besides]
        self._doubts = False
        return unfinished + sum(f.file_bytes * sum(1 for _ in f.block_ids()) for f in folders)

    def _room(self, used: int) -> int:
        disk = os.statvfs(self._directory.root)
        return min(self._directory.budget, used + disk.f_bavail * disk.f_frsize)

    def _limit_to(self, used: int) -> None:
        if self.limit == self._directory.budget:
            logger.warning("%s: the disk is full; older blocks go", self._directory.root)
        self.limit = min(self.limit, used)

    def _make_file(self, path: str, used: int) -> File | None:
        """A new file; None where the disk has no room for it, which lowers the limit."""
        try:
            file = self._directory.backend.create(path)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._limit_to(used)
            return None
        self._directory.ledger.used = used + self._size
        return file

    def _open_again(self, path: str, used: int) -> File:
        """The file of a block that was evicted."""
        directory = self._directory
        try:
            return directory.backend.reuse(path)
        except OSError:
            with suppress(OSError):
                directory.backend.unlink(path)
            directory.ledger.used = used - self._size
            raise

    def _take_file(self, victim: Victim, path: str) -> bool:
        """Evict a block and leave its file at `path`. False when it is not there to go."""
        if not self._may_go(victim):
            return False
        try:
            self._directory.backend.rename(victim.path, path)
        except FileNotFoundError:
            return self._is_gone(victim)
        return self._has_gone(victim)

    def _remove(self, victim: Victim) -> int:
        """Evict a block and remove its file. Returns the bytes that are free."""
        if not self._may_go(victim):
            return 0
        try:
            self._directory.backend.unlink(victim.path)
        except FileNotFoundError:
            self._is_gone(victim)
            return 0
        self._has_gone(victim)
        return victim.folder.file_bytes

    def _may_go(self, victim: Victim) -> bool:
        """Whether no other server, and no other rank, has used a block since."""
        directory = self._directory
        if directory.membership.alone and victim.folder == directory.folder:
            return True
        try:
            used = directory.backend.last_use(victim.path)
        except FileNotFoundError:
            return self._is_gone(victim)
        if used > victim.used and victim.folder == directory.folder:
            directory.used_elsewhere(victim.block_id, used)
        return used <= victim.used

    def _has_gone(self, victim: Victim) -> bool:
        if victim.folder == self._directory.folder:
            self._directory.forget(victim.block_id)
        self._directory.count("evicted_blocks")
        return True

    def _is_gone(self, victim: Victim) -> bool:
        """Somebody else has removed a block: False."""
        self._doubts = self._doubts or self._directory.membership.alone
        if victim.folder == self._directory.folder:
            self._directory.forget(victim.block_id)
        return False
