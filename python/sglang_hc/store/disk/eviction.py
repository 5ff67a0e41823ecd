"""Room for one more file in a directory, and what goes for it.

Where a block has to go, its file stays: it gets another name and is written over. File systems are
slow at making and removing files, and slower at making some where others have just gone. Other
servers may have used a block: its file says so, and is asked before it goes.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from itertools import islice

from sglang_hc.store.disk.backend import File
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.folders import cleared_folders, model_folders
from sglang_hc.store.disk.sharing import unfinished_bytes
from sglang_hc.store.disk.victims import PAGE, Victim, Victims

logger = logging.getLogger(__name__)

BATCH_BLOCKS = 64
"""Most blocks that are removed at once: other servers wait for the lock meanwhile."""

NEARLY_FULL = 0.9
"""Of the limit: from then on it is known when all that is here was used last. With a million blocks
that takes seconds, which a server with room need not spend."""


class Evictor:
    """Keeps the files of one directory within bounds: those of blocks are made and removed here.

    limit: bytes that the files may take: the budget, or less where the disk has no room for it.
    """

    def __init__(self, directory: Directory, uses: dict[bytes, float]) -> None:
        """uses: see `Victims`."""
        self.directory = directory
        self._size = directory.folder.file_bytes
        self._victims = Victims(directory, uses)
        self._doubts = False
        """Files are gone that this server alone would have removed: the ledger counts them."""
        self._is_full = False
        self.limit = directory.budget

    def open(self) -> None:
        """Count what is there, and take less than the budget where the disk has less room. Raises
        OSError."""
        directory = self.directory
        with directory.ledger.held():
            directory.ledger.used = used = self._count_files()
        self.limit = self._room(used)
        if self.limit < directory.budget:
            self._is_full = True
            logger.warning(
                "%s: the disk has room for %.1f of the %.1f GB of the budget; blocks are evicted "
                "when that is full",
                directory.root, self.limit / 1e9, directory.budget / 1e9,
            )  # fmt: skip

    def make_file(self, path: str) -> File | None:
        """A file for a block at `path`, to be written over: a new one, or that of a block that goes
        for it. None when nothing can go. Raises OSError."""
        directory = self.directory
        with directory.ledger.held(directory.making_room):
            counted, removed = False, 0
            while (used := self._used()) + self._size > self.limit:
                victim = self._victims.next()
                if (victim is None and counted) or removed == BATCH_BLOCKS:
                    return None
                if victim is None:  # what others stored can go, what somebody removed is free
                    directory.find_others()
                    directory.ledger.used = self._count_files()
                    counted = True
                elif victim.folder.file_bytes != self._size or used > self.limit:
                    removed += self._evict_one(victim) > 0
                elif self._take_file(victim, path):
                    file = self._open_again(path)
                    if file is not None:
                        return file
            directory.ledger.used = used + self._size
            try:
                return directory.backend.create(path)
            except OSError:
                directory.ledger.freed(self._size)
                raise

    def drop_file(self, path: str) -> None:
        """Remove a file of `make_file` again. Raises OSError."""
        directory = self.directory
        with directory.ledger.held(), suppress(FileNotFoundError):
            directory.backend.unlink(path)
            directory.ledger.freed(self._size)

    def publish(self, path: str, block_id: bytes) -> None:
        """Give a file of `make_file` the name of its block, in place of what has it: another server
        may have written the block meanwhile. Raises OSError."""
        directory = self.directory
        target = directory.path(block_id)
        if directory.membership.alone and not self._is_there(target):
            directory.backend.rename(path, target)
            return
        with directory.ledger.held():
            if self._is_there(target):
                directory.backend.unlink(target)
                directory.ledger.freed(self._size)
            directory.backend.rename(path, target)

    def _is_there(self, path: str) -> bool:
        try:
            self.directory.backend.last_use(path)
        except FileNotFoundError:
            return False
        return True

    def disk_is_full(self) -> None:
        """The disk has no room for a file although the limit has: take less from now on. Raises
        OSError."""
        directory = self.directory
        if not self._is_full:
            self._is_full = True
            logger.warning("%s: the disk is full; older blocks go", directory.root)
        with directory.ledger.held(directory.making_room):
            self.limit = min(self.limit, self._used())
            self._evict(self._size)  # what fills the disk may be in it by now

    def expire(self, before: int) -> None:
        """Remove every block of this model last used before that time, in ns since 1970. Raises
        OSError."""
        directory = self.directory
        directory.learn_uses()
        directory.note_touches()
        while old := self._older(before):
            with directory.ledger.held(directory.making_room):
                freed = sum(map(self._remove, old))
            directory.count("expired_blocks", freed // self._size)

    def _older(self, than: int) -> list[Victim]:
        folder, known = self.directory.folder, self.directory.oldest(PAGE)
        old = (Victim(used, folder, name) for name, used in known if used < than)
        return list(islice(old, BATCH_BLOCKS))

    # -- upkeep ----------------------------------------------------------------------------------

    def count(self) -> None:
        """Put the ledger right: files may have been removed by hand. Raises OSError."""
        with self.directory.ledger.held():
            self.directory.ledger.used = self._count_files()

    def look_for_room(self) -> None:
        """The disk may have got more room, or less. Raises OSError."""
        with self.directory.ledger.held():
            used = self._used()
        self.limit = self._room(used)

    def trim(self) -> bool:
        """Evict some of what is above the limit, as after a start with a smaller budget. False when
        nothing is, or nothing can go. Raises OSError."""
        directory = self.directory
        with directory.ledger.held(directory.making_room):
            above = self._used() - self.limit
            most = BATCH_BLOCKS * self._size
            return above > 0 and self._evict(min(above, most)) > 0

    def prepare(self) -> None:
        """Where blocks will have to go soon, find out which, so that no write waits for that.
        Raises OSError."""
        directory = self.directory
        with directory.ledger.held():
            nearly_full = self._used() > NEARLY_FULL * self.limit
        if nearly_full:
            directory.learn_uses()
            self._victims.look_for_foreign()

    # -- while the ledger is held ----------------------------------------------------------------

    def _used(self) -> int:
        used = self.directory.ledger.used
        if self._doubts:
            self.directory.find_others()  # so that no other block goes for those that are gone
        return self._count_files() if used is None or self._doubts else used

    def _count_files(self) -> int:
        """Bytes that all files take, by a look at their names."""
        root = self.directory.root
        self._doubts = False
        unfinished = unfinished_bytes(root)  # first: what gets its name meanwhile counts twice
        folders = model_folders(root) + cleared_folders(root)
        return unfinished + sum(f.file_bytes * sum(1 for _ in f.block_ids()) for f in folders)

    def _room(self, used: int) -> int:
        directory = self.directory
        return min(directory.budget, used + directory.backend.free_bytes(directory.root))

    def _evict(self, wanted: int) -> int:
        """Evict until so many bytes are free. Returns how many are; fewer when nothing more can
        go."""
        freed = 0
        while freed < wanted and (victim := self._victims.next()) is not None:
            freed += self._evict_one(victim)
        return freed

    def _evict_one(self, victim: Victim) -> int:
        freed = self._remove(victim)
        self.directory.count("evicted_blocks", freed > 0)
        return freed

    def _remove(self, victim: Victim) -> int:
        """Remove a block, unless somebody else used it since. Returns the bytes that are free.
        Raises OSError; the block is not known any more then, or it would be the first to go again
        and again."""
        directory = self.directory
        if not self._may_go(victim):
            return 0
        try:
            directory.backend.unlink(victim.path)
        except FileNotFoundError:
            self._doubts = self._doubts or directory.membership.alone
            return 0
        finally:
            self._forget(victim)
        directory.ledger.freed(victim.folder.file_bytes)
        return victim.folder.file_bytes

    def _take_file(self, victim: Victim, path: str) -> bool:
        """Evict a block and leave its file at `path`. False when it is not there to go. Raises as
        `_remove`."""
        directory = self.directory
        if not self._may_go(victim):
            return False
        try:
            directory.backend.rename(victim.path, path)
        except FileNotFoundError:
            self._doubts = self._doubts or directory.membership.alone
            return False
        finally:
            self._forget(victim)
        directory.count("evicted_blocks")
        return True

    def _open_again(self, path: str) -> File | None:
        """The file of a block that was evicted; None where somebody put something else in its
        place, which is removed."""
        directory = self.directory
        try:
            return directory.backend.reuse(path)
        except OSError as error:
            directory.backend.unlink(path)
            directory.ledger.freed(self._size)
            if isinstance(error, IsADirectoryError):
                return None
            raise

    def _may_go(self, victim: Victim) -> bool:
        """Whether no other server, and no other rank, has used a block since it was looked at."""
        directory = self.directory
        mine = victim.folder == directory.folder
        if directory.membership.alone and mine:
            return True
        try:
            used = directory.backend.last_use(victim.path)
        except FileNotFoundError:
            self._forget(victim)
            return False
        if used > victim.used and mine:
            directory.used_elsewhere(victim.block_id, used)
        return used <= victim.used

    def _forget(self, victim: Victim) -> None:
        if victim.folder == self.directory.folder:
            self.directory.forget(victim.block_id)
