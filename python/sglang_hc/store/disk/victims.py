"""Which block of a directory goes next.

Blocks that no waiting request needs go first, the least recently used before others, of whichever
model and whichever server stored them. When every block is needed, the one that is needed last goes
first (AttentionStore section 3.3.2).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.folders import ModelFolder, model_folders

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
    """Those of one directory. For whoever holds its `making_room`, but for `look_for_foreign`.
    Methods raise OSError.

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
        """Know what other models and other parts have here, if nothing is known. Takes
        `making_room` for as long as it takes to say so."""
        if not self._foreign:
            found = self._find_foreign()
            with self._directory.making_room:
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
