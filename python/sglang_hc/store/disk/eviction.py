"""Making room in a directory: old blocks go, of whichever model and whichever server stored them.

Blocks that no waiting request needs are evicted first, the least recently used before others. When
every block is needed, the one that is needed last goes first (AttentionStore section 3.3.2). Other
servers may have used a block: its file says so, and is asked before it goes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from sglang_hc.store.disk.backend import File
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.folders import ModelFolder, cleared_folders, model_folders
from sglang_hc.store.disk.sharing import unfinished_bytes

logger = logging.getLogger(__name__)

BATCH_SHARE = 64
"""Part of the budget that is evicted at once, or one block where that is more."""

BATCH_BLOCKS = 64
"""Most blocks that are evicted at once: other servers wait for the lock meanwhile."""

NEARLY_FULL = 0.9
"""Of the limit: from then on it is known what other models and parts have here."""

PAGE = 1024
"""Of the longest unused blocks, how many are put in the order of their uses."""


class _Victim(NamedTuple):
    """used: in ns since 1970, as far as known here."""

    used: int
    folder: ModelFolder
    block_id: bytes


class Evictor:
    """Keeps the files of one directory within bounds: those of blocks are made and removed here.

    uses: when waiting requests will use blocks, see `DiskStore.expect`; changed by its owner.
    limit: bytes that the files may take: the budget, or less where the disk has no room for it.
    """

    def __init__(self, directory: Directory, uses: Mapping[bytes, float]) -> None:
        self.directory = directory
        self._uses = uses
        self._foreign: deque[_Victim] | None = None
        """Blocks of other models and other parts, the oldest first; None before they are needed."""
        self._doubts = False
        """Files are gone that this server alone would have removed: the ledger counts them."""
        self._is_full = False
        self.limit = directory.budget

    def open(self) -> None:
        """Count what is there, and take less than the budget where the disk has less room. Raises
        OSError."""
        directory = self.directory
        self.limit = self._room(self.count())
        if self.limit < directory.budget:
            self._is_full = True
            logger.warning(
                "%s: the disk has room for %.1f of the %.1f GB of the budget; blocks are evicted "
                "when that is full",
                directory.root, self.limit / 1e9, directory.budget / 1e9,
            )  # fmt: skip

    def make_file(self, path: str, size: int) -> File | None:
        """Make a file of so many bytes, and evict what must go for it. None when nothing can go.
        Raises OSError."""
        directory = self.directory
        with directory.making_room, directory.ledger.held():
            if not self._has_room(size) and not self._has_room(size):
                return None
            directory.ledger.used = self._used() + size
            try:
                return directory.backend.create(path)
            except OSError:
                directory.ledger.freed(size)
                raise

    def drop_file(self, path: str, size: int) -> None:
        """Remove a file of `make_file` again. Raises OSError."""
        directory = self.directory
        with directory.ledger.held(), suppress(FileNotFoundError):
            directory.backend.unlink(path)
            directory.ledger.freed(size)

    def publish(self, path: str, block_id: bytes, size: int) -> None:
        """Give a file of `make_file` the name of its block, in place of what has it: another server
        may have written the block meanwhile. Raises OSError."""
        directory = self.directory
        target = directory.path(block_id)
        with directory.ledger.held():
            try:
                directory.backend.last_use(target)
            except FileNotFoundError:
                directory.backend.rename(path, target)
                return
            directory.backend.unlink(target)
            directory.ledger.freed(size)
            directory.backend.rename(path, target)

    def disk_is_full(self, size: int) -> None:
        """The disk has no room for a file of that size although the limit has: take less from now
        on, and evict. Raises OSError."""
        directory = self.directory
        if not self._is_full:
            self._is_full = True
            logger.warning("%s: the disk is full; older blocks go", directory.root)
        with directory.making_room, directory.ledger.held():
            used = self._used()
            self.limit = min(self.limit, used)
            self._evict(min(max(size, used // BATCH_SHARE), BATCH_BLOCKS * size))

    def expire(self, before: int) -> None:
        """Remove every block of this model last used before that time, in ns since 1970. Raises
        OSError."""
        directory = self.directory
        directory.learn_uses()
        directory.note_touches()
        while old := self._older(before):
            with directory.making_room, directory.ledger.held():
                freed = sum(map(self._remove, old))
            directory.count("expired_blocks", freed // directory.folder.file_bytes)

    def _older(self, than: int) -> list[_Victim]:
        folder, known = self.directory.folder, self.directory.oldest(PAGE)
        old = (_Victim(used, folder, name) for name, used in known if used < than)
        return list(islice(old, BATCH_BLOCKS))

    # -- upkeep ----------------------------------------------------------------------------------

    def count(self) -> int:
        """Put the ledger right: files may have been removed by hand. Returns the bytes that all
        files take. Raises OSError."""
        ledger = self.directory.ledger
        with ledger.held():
            ledger.used = used = self._count_files()
        return used

    def look_for_room(self) -> None:
        """The disk may have got more room, or less. Raises OSError."""
        with self.directory.ledger.held():
            used = self._used()
        self.limit = self._room(used)

    def trim(self) -> bool:
        """Evict some of what is above the limit, as after a start with a smaller budget. False when
        nothing is, or nothing can go. Raises OSError."""
        directory = self.directory
        with directory.making_room, directory.ledger.held():
            above = self._used() - self.limit
            return above > 0 and self._evict(min(above, self._batch())) > 0

    def look_for_foreign(self) -> None:
        """Other models and parts may have stored more since all that was known of them went. Raises
        OSError."""
        directory = self.directory
        with directory.ledger.held():
            needed = not self._foreign and self._used() > NEARLY_FULL * self.limit
        if needed:
            found = self._find_foreign()
            with directory.making_room:
                self._foreign = found

    # -- while the ledger is held ----------------------------------------------------------------

    def _has_room(self, size: int) -> bool:
        """Whether a file of that size fits, after an eviction where one is needed. It may be worth
        a second try when it does not."""
        above = self._used() + size - self.limit
        if above <= 0:
            return True
        wanted = max(above, self.limit // BATCH_SHARE)
        freed = self._evict(min(wanted, BATCH_BLOCKS * size))
        if self._doubts:
            self.directory.find_others()
            self._foreign = None
        if self._doubts or not freed:
            self.directory.ledger.used = self._count_files()
        return self._used() + size <= self.limit

    def _used(self) -> int:
        used = self.directory.ledger.used
        return self._count_files() if used is None else used

    def _count_files(self) -> int:
        """Bytes that all files take, by a look at their names."""
        root = self.directory.root
        self._doubts = False
        folders = model_folders(root) + cleared_folders(root)
        blocks = sum(f.file_bytes * sum(1 for _ in f.block_ids()) for f in folders)
        return unfinished_bytes(root) + blocks

    def _room(self, used: int) -> int:
        directory = self.directory
        return min(directory.budget, used + directory.backend.free_bytes(directory.root))

    def _batch(self) -> int:
        return BATCH_BLOCKS * self.directory.folder.file_bytes

    def _evict(self, wanted: int) -> int:
        """Evict until so many bytes are free. Returns how many are; fewer when nothing more can
        go."""
        directory = self.directory
        directory.learn_uses()
        directory.note_touches()
        freed = 0
        needed: list[_Victim] = []
        for victim in self._oldest():
            if victim.block_id in self._uses:
                needed.append(victim)
            else:
                freed += self._evict_one(victim)
            if freed >= wanted or self._doubts:
                return freed
        for victim in sorted(needed, key=self._use, reverse=True):
            freed += self._evict_one(victim)
            if freed >= wanted:
                break
        return freed

    def _oldest(self) -> Iterator[_Victim]:
        """All blocks that are known here, about the longest unused first."""
        if self._foreign is None:
            self._foreign = self._find_foreign()
        for victim in self._own():
            while self._foreign and self._foreign[0] < victim:
                yield self._foreign.popleft()
            yield victim
        while self._foreign:
            yield self._foreign.popleft()
        self._foreign = None  # others may have stored more; looked for when they are needed

    def _own(self) -> Iterator[_Victim]:
        directory, count = self.directory, PAGE
        given: set[bytes] = set()
        while True:
            page = [one for one in directory.oldest(count) if one[0] not in given]
            if not page:
                return
            yield from sorted(_Victim(used, directory.folder, name) for name, used in page)
            given.update(name for name, _ in page)
            count *= 8

    def _evict_one(self, victim: _Victim) -> int:
        freed = self._remove(victim)
        self.directory.count("evicted_blocks", freed > 0)
        return freed

    def _remove(self, victim: _Victim) -> int:
        """Remove a block, unless somebody else used it since. Returns the bytes that are free.
        Raises OSError; the block is not known any more then, or it would be the first to go again
        and again."""
        directory = self.directory
        path = victim.folder.block_path(victim.block_id)
        mine = victim.folder == directory.folder
        try:
            used = 0 if directory.membership.alone else directory.backend.last_use(path)
            if used > victim.used:
                if mine:
                    directory.used_elsewhere(victim.block_id, used)
                return 0
            directory.backend.unlink(path)
        except FileNotFoundError:
            self._doubts = self._doubts or directory.membership.alone
            freed = 0
        except OSError:
            if mine:
                directory.forget(victim.block_id)
            raise
        else:
            freed = victim.folder.file_bytes
            directory.ledger.freed(freed)
        if mine:
            directory.forget(victim.block_id)
        return freed

    def _find_foreign(self) -> deque[_Victim]:
        directory = self.directory
        folders = [one for one in model_folders(directory.root) if one != directory.folder]
        uses_in = directory.uses_in
        return deque(sorted(_Victim(used, f, name) for f in folders for name, used in uses_in(f)))

    def _use(self, victim: _Victim) -> float:
        return self._uses.get(victim.block_id, 0.0)
