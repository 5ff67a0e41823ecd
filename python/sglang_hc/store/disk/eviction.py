"""Room for one more file in a directory, and what goes for it.

Where a block has to go, its file stays: it gets another name and is written over. File systems are
slow at making and removing files, and slower at making some where others have just gone. Other
servers may have used a block: its file says so, and is asked before it goes.

Blocks that no waiting request needs go first, the least recently used before others, of whichever
model and whichever server stored them. When every block is needed, the one that is needed last goes
first (AttentionStore section 3.3.2).
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from sglang_hc.store.disk.backend import File
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.folders import ModelFolder, model_folders
from sglang_hc.store.disk.sharing import unfinished_bytes

logger = logging.getLogger(__name__)

BATCH_BLOCKS = 64
"""Most blocks that are removed at once: other servers wait for the lock meanwhile."""

NEARLY_FULL = 0.9
"""Of the limit: from then on it is known when all that is here was used last. With a million blocks
that takes seconds, which a server with room need not spend."""


PAGE = 1024
"""Of the longest unused blocks, how many are put in the order of their uses at once."""


class Victim(NamedTuple):
    """used: in ns since 1970, as far as known here. is_needed: it goes although it is needed."""

    used: int
    folder: ModelFolder
    block_id: bytes
    is_needed: bool = False

    @property
    def path(self) -> str:
        """Of its file."""
        return self.folder.block_path(self.block_id)


class Victims:
    """Those of one directory. For whoever holds its ledger, but for `look_for_foreign`. Methods
    raise OSError.

    uses: when waiting requests will use blocks, see `DiskStore.expect`; changed by its owner.
    """

    def __init__(self, directory: Directory, uses: dict[bytes, float]) -> None:
        self._directory = directory
        self._uses = uses
        self._queue: deque[Victim] = deque()
        self._foreign: deque[Victim] | None = None
        """Blocks of other models and other parts, the oldest first; None before they are needed."""

    def next(self) -> Victim | None:
        """The block that goes next; None when none is known. It is not given again."""
        directory = self._directory
        directory.note_touches()
        if self._foreign is None:
            self._foreign = self._find_foreign()
        while self._queue or self._fill():
            foreign = self._next_foreign(before=self._queue[0])
            if foreign is not None:
                return foreign
            victim = self._queue.popleft()
            wanted = victim.block_id in self._uses and not victim.is_needed
            if not wanted and directory.blocks.get(victim.block_id) == victim.used:
                return victim
        last = self._next_foreign()
        if last is None:
            self._foreign = None  # there may be more when somebody asks again
        return last

    def _next_foreign(self, before: Victim | None = None) -> Victim | None:
        """Other ranks need their parts of a block when this one does."""
        while self._foreign and (before is None or self._foreign[0] < before):
            victim = self._foreign.popleft()
            if victim.block_id not in self._uses:
                return victim
        return None

    def look_for_foreign(self) -> None:
        """Know what other models and other parts have here, if nothing is known. Holds the ledger
        for as long as it takes to say so."""
        if not self._foreign:
            found = self._find_foreign()
            with self._directory.ledger.held():
                self._foreign = found

    def _fill(self) -> bool:
        """Queue some of the longest unused of this model. False when there is nothing."""
        directory = self._directory
        directory.learn_uses()
        self._queue.extend(self._unneeded())
        if not self._queue and not self._foreign and directory.blocks and self._uses:
            self._queue.extend(self._needed_last())
        return bool(self._queue)

    def _unneeded(self) -> list[Victim]:
        """Blocks of this model that nobody needs, about the longest unused, in their order."""
        directory, count = self._directory, PAGE
        while True:
            page = directory.oldest(count)
            found = [(used, name) for name, used in page if name not in self._uses]
            if found or len(page) < count:
                return sorted(Victim(used, directory.folder, name) for used, name in found)
            count *= 8

    def _needed_last(self) -> list[Victim]:
        directory = self._directory
        needed = [name for name in self._uses.copy() if name in directory.blocks]
        last = max(needed, key=lambda name: self._uses.get(name, 0.0), default=None)
        used = None if last is None else directory.blocks.get(last)
        if last is None or used is None:
            return []
        return [Victim(used, directory.folder, last, is_needed=True)]

    def _find_foreign(self) -> deque[Victim]:
        directory = self._directory
        folders = [one for one in model_folders(directory.root) if one != directory.folder]
        uses_in = directory.uses_in
        return deque(sorted(Victim(used, f, name) for f in folders for name, used in uses_in(f)))


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
        with directory.ledger.held():
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
        with directory.ledger.held():
            self.limit = min(self.limit, self._used())
            self._evict(self._size)  # what fills the disk may be in it by now

    def expire(self, before: int) -> None:
        """Remove every block of this model last used before that time, in ns since 1970. Raises
        OSError."""
        directory = self.directory
        directory.learn_uses()
        directory.note_touches()
        while old := self._older(before):
            with directory.ledger.held():
                freed = sum(map(self._remove, old))
            directory.count("expired_blocks", freed // self._size)

    def _older(self, than: int) -> list[Victim]:
        folder, known = self.directory.folder, self.directory.oldest(PAGE)
        old = (Victim(used, folder, name) for name, used in known if used < than)
        return list(islice(old, BATCH_BLOCKS))

    # -- upkeep ----------------------------------------------------------------------------------

    def look(self, *, count: bool) -> None:
        """See how much room there is: the disk may have got more, or less. Where blocks will have
        to go soon, find out which, so that no write waits for that. count: put the ledger right,
        because files may have been removed by hand. Raises OSError."""
        directory = self.directory
        with directory.ledger.held():
            if count:
                directory.ledger.used = self._count_files()
            used = self._used()
        self.limit = self._room(used)
        if used > NEARLY_FULL * self.limit:
            directory.learn_uses()
            self._victims.look_for_foreign()

    def trim(self) -> bool:
        """Evict some of what is above the limit, as after a start with a smaller budget. False when
        nothing is, or nothing can go. Raises OSError."""
        directory = self.directory
        with directory.ledger.held():
            above = self._used() - self.limit
            most = BATCH_BLOCKS * self._size
            return above > 0 and self._evict(min(above, most)) > 0

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
        return unfinished + sum(one.bytes_used() for one in model_folders(root))

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
