"""Making room in a directory: old blocks go, of whichever model and whichever server stored them.

Blocks that no waiting request needs are evicted first, the least recently used before others. When
every block is needed, the one that is needed last goes first (AttentionStore section 3.3.2). Other
servers may have used a block: its file says so, and is asked before it goes.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.folders import ModelFolder, model_folders
from sglang_hc.store.disk.sharing import unfinished_bytes

logger = logging.getLogger(__name__)

BATCH_SHARE = 64
"""Part of the budget that is evicted at once, or one block where that is more."""

BATCH_BLOCKS = 64
"""Most blocks that are evicted at once: other servers wait for the lock meanwhile."""

_PAGE = 1024
"""Of the longest unused blocks, how many are put in the order of their uses."""


class _Victim(NamedTuple):
    """used: in ns since 1970, as far as known here."""

    used: int
    folder: ModelFolder
    block_id: bytes


class Evictor:
    """Frees bytes of one directory.

    uses: when waiting requests will use blocks, see `DiskStore.expect`; changed by its owner.
    limit: bytes that the files may take: the budget, or less where the disk has no room for it.
    """

    def __init__(self, directory: Directory, uses: Mapping[bytes, float]) -> None:
        self._directory = directory
        self._uses = uses
        self._foreign: deque[_Victim] | None = None
        """Blocks of other models and other parts, the oldest first; None before they are needed."""
        self._doubts = False
        """Files are gone that this server alone would have removed: the ledger counts them."""
        self.limit = directory.budget

    def open(self) -> None:
        """Count what is there, and take less than the budget where the disk has less room. Raises
        OSError."""
        directory = self._directory
        with directory.ledger.held():
            directory.ledger.used = used = self._count_files()
        self.limit = self._room(used)
        if self.limit < directory.budget:
            logger.warning(
                "%s: the disk has room for %.1f of the %.1f GB of the budget; blocks are evicted "
                "when that is full",
                directory.root, self.limit / 1e9, directory.budget / 1e9,
            )  # fmt: skip

    def reserve(self, size: int) -> bool:
        """Take room for a file of so many bytes, and evict what must go for it. False when nothing
        can go. Raises OSError."""
        ledger = self._directory.ledger
        with self._directory.making_room, ledger.held():
            used = self._used()
            if used + size > self.limit:
                batch = min(self.limit // BATCH_SHARE, BATCH_BLOCKS * size)
                used -= self._evict(max(used + size - self.limit, batch))
                if used + size > self.limit or self._doubts:
                    used = self._count_files()
            fits = used + size <= self.limit
            ledger.used = used + size * fits
            return fits

    def disk_is_full(self, size: int) -> bool:
        """The disk has no room for a file although the limit has: take less from now on, and evict.
        Whether that gave room. The file's own room is given back. Raises OSError."""
        ledger = self._directory.ledger
        with self._directory.making_room, ledger.held():
            used = self._used() - size
            if self.limit == self._directory.budget:
                logger.warning("%s: the disk is full; older blocks go", self._directory.root)
            self.limit = min(self.limit, used)
            freed = self._evict(min(max(size, used // BATCH_SHARE), BATCH_BLOCKS * size))
            ledger.used = used - freed
            return freed > 0

    def look_for_room(self) -> None:
        """The disk may have got more room, or less. Raises OSError."""
        ledger = self._directory.ledger
        with ledger.held():
            used = self._used()
        self.limit = self._room(used)

    def expire(self, before: int) -> None:
        """Remove every block of this model last used before that time, in ns since 1970. Raises
        OSError."""
        directory = self._directory
        directory.learn_uses()
        directory.note_touches()
        freed = directory.folder.file_bytes
        while freed:
            oldest = (_Victim(u, directory.folder, name) for name, u in directory.oldest(_PAGE))
            with directory.making_room, directory.ledger.held():
                used = self._used()
                freed = sum(self._remove(victim) for victim in oldest if victim.used < before)
                directory.ledger.used = used - freed
            directory.count("expired_blocks", freed // directory.folder.file_bytes)

    # -- while the ledger is held ----------------------------------------------------------------

    def _used(self) -> int:
        used = self._directory.ledger.used
        return self._count_files() if used is None else used

    def _count_files(self) -> int:
        """Bytes that all files take, by a look at their names."""
        root = self._directory.root
        unfinished = unfinished_bytes(root)  # first: what gets its name meanwhile counts twice
        folders = model_folders(root)
        self._doubts = False
        return unfinished + sum(f.file_bytes * sum(1 for _ in f.block_ids()) for f in folders)

    def _room(self, used: int) -> int:
        disk = os.statvfs(self._directory.root)
        return min(self._directory.budget, used + disk.f_bavail * disk.f_frsize)

    def _evict(self, wanted: int) -> int:
        """Evict until so many bytes are free. Returns how many are; fewer when nothing more can
        go."""
        directory = self._directory
        directory.learn_uses()
        directory.note_touches()
        freed = 0
        needed: list[_Victim] = []
        for victim in self._oldest():
            if victim.block_id in self._uses:
                needed.append(victim)
            else:
                freed += self._remove(victim)
            if freed >= wanted:
                break
        for victim in sorted(needed, key=self._use, reverse=True):
            if freed >= wanted:
                break
            freed += self._remove(victim)
        directory.count("evicted_blocks", -(-freed // directory.folder.file_bytes))
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
        directory, count = self._directory, _PAGE
        given: set[bytes] = set()
        while True:
            page = [one for one in directory.oldest(count) if one[0] not in given]
            if not page:
                return
            yield from sorted(_Victim(used, directory.folder, name) for name, used in page)
            given.update(name for name, _ in page)
            count *= 8

    def _remove(self, victim: _Victim) -> int:
        """Remove a block, unless somebody else used it since. Returns the bytes that are free."""
        directory = self._directory
        path = victim.folder.block_path(victim.block_id)
        mine = victim.folder == directory.folder
        try:
            if not directory.membership.alone and mine:
                used = directory.backend.last_use(path)
                if used > victim.used:
                    directory.used_elsewhere(victim.block_id, used)
                    return 0
            directory.backend.unlink(path)
        except FileNotFoundError:
            self._doubts = self._doubts or directory.membership.alone
            freed = 0
        else:
            freed = victim.folder.file_bytes
        if mine:
            directory.forget(victim.block_id)
        return freed

    def _find_foreign(self) -> deque[_Victim]:
        directory = self._directory
        folders = [one for one in model_folders(directory.root) if one != directory.folder]
        return deque(sorted(_Victim(used, f, name) for f in folders for name, used in f.uses()))

    def _use(self, victim: _Victim) -> float:
        return self._uses.get(victim.block_id, 0.0)
