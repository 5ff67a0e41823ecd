"""One open `--hc-disk` directory: this model's blocks in it, and when each was used last."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np

from sglang_hc.errors import ConfigError
from sglang_hc.store.circuit_breaker import CircuitBreaker
from sglang_hc.store.disk.backend import DirectBackend, make_folders
from sglang_hc.store.disk.folders import LABEL_NAME, ModelFolder, folder_of
from sglang_hc.store.disk.format import StoredModel
from sglang_hc.store.disk.sharing import Ledger, LockTimeout, Membership

logger = logging.getLogger(__name__)

GIGABYTE = 10**9
TOUCHES_KEPT = 1 << 16
NOTED_NS = 10 * 10**9
"""A use is noted on the disk where the last one noted is so much older."""
AHEAD_NS = 60 * 10**9
"""How far clocks of servers may differ."""
_STARTED = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since 1970 as the system's clock said when this process began. Steps of that clock
    change nothing: no pause takes an hour longer, and no block grows a year older at once."""
    return _STARTED + time.monotonic()


class DirectoryError(ConfigError):
    """A directory that cannot be used. The message names it and the remedy, for users."""


class DirectoryLost(DirectoryError):
    """The device of a directory fails. That is not the user's mistake; other directories may
    work."""


@dataclass(frozen=True)
class DirectorySpec:
    """One `--hc-disk DIR[:SIZE_GB]`. size_bytes None: a share of what is free at start.

    users: ranks of this server that keep parts of the same blocks in it.
    """

    path: str
    size_bytes: int | None = None
    users: int = 1

    @classmethod
    def parse(cls, text: str, users: int = 1) -> DirectorySpec:
        """Raises DirectoryError. Only a last part that is a number is a size: `/a:b` is a path, and
        `/a:200GB` is neither."""
        match = re.fullmatch(r"(?s)(.+):([0-9]+(?:\.[0-9]+)?)", text)
        if match is None:
            if not text or re.search(r":-?[0-9.]*([0-9][^/:]*)?$", text):
                raise DirectoryError(
                    f"--hc-disk {text!r}: give DIR or DIR:SIZE_GB, for example /mnt/ssd:200"
                )
            return cls(text, users=users)
        size = int(float(match[2]) * GIGABYTE)
        if size <= 0:
            raise DirectoryError(f"--hc-disk {text!r}: the size must be more than 0 GB")
        return cls(match[1], size, users)


class Directory:
    """An open directory for one model. Thread-safe. Made by `opening.open_directory`.

    budget: bytes that the files of all models in it may take, by whichever server.

    blocks: identities of this model's blocks that are here as far as this server knows, the longest
    unused first, with the time of their last use in ns since 1970; 0 before `learn_uses`. Looking
    into it needs no lock. It is only changed by the store. breaker: gives the directory a pause
    when its I/O keeps failing. hangs: a thread has not come back from it.
    """

    def __init__(
        self,
        root: str,
        model: StoredModel,
        spec: DirectorySpec,
        budget: int,
        backend: DirectBackend,
        sharing: tuple[Ledger, Membership],
        clock: Callable[[], float],
    ) -> None:
        self.root = root
        self.model = model
        self.folder: ModelFolder = folder_of(root, model)
        self.budget = budget
        self.capacity = budget // self.folder.file_bytes // spec.users
        """Blocks that fit, where all users have as many."""
        self.backend = backend
        self.ledger, self.membership = sharing
        self.clock = clock
        self.breaker = CircuitBreaker(clock)
        self.blocks: OrderedDict[bytes, int] = OrderedDict.fromkeys(self.folder.block_ids(), 0)
        self.knows_uses = False
        self.hangs = False
        self._changing = threading.Lock()
        """Held over memory alone, while `blocks` changes."""
        self._changed: deque[bytes] | None = None
        """None until somebody asks: most servers mirror no disk."""
        self._touches: deque[tuple[int, Sequence[bytes]]] = deque(maxlen=TOUCHES_KEPT)
        """Uses that were not noted yet: (ns since 1970, identities in path order)."""
        self._counting = threading.Lock()
        self._counted: Counter[str] = Counter()

    def write_label(self) -> None:
        """Make this model's folder, and say in it whose it is. Raises OSError."""
        make_folders(self.folder.path)
        write_small(os.path.join(self.folder.path, LABEL_NAME), self.model.label)

    # -- health -------------------------------------------------------------------------------

    def usable(self) -> bool:
        """Whether this directory may be asked now. Cheap; takes no lock."""
        return not self.hangs and self.breaker.allows()

    def count(self, name: str, amount: int = 1) -> None:
        """Count something that no answer to a read or a write tells."""
        with self._counting:
            self._counted[name] += amount

    def counters(self) -> Counter[str]:
        """All that was counted since the directory was opened."""
        with self._counting:
            return self._counted.copy()

    def io_failed(self, error: OSError) -> None:
        """An operation failed. After several in a row the directory gets a pause; one that is only
        busy does not."""
        if isinstance(error, LockTimeout):
            self.count("lock_timeouts")
        elif self.breaker.failed():
            self.count("directory_pauses")
            logger.error(
                "%s keeps failing; it is not used for a while, and its blocks are not found",
                self.root,
            )

    def io_succeeded(self) -> None:
        """A read or write came back well."""
        if self.breaker.succeeded():
            logger.warning("%s answers again; it is used again", self.root)

    def note_hang(self, hangs: bool) -> None:
        """Whether its disk answers; one that does not is out of use until it does."""
        if hangs != self.hangs:
            self.hangs = hangs
            self.count("directory_hangs", int(hangs))
            state = "does not answer; it is not used until it does" if hangs else "answers again"
            logger.error("%s %s", self.root, state)

    # -- blocks -------------------------------------------------------------------------------

    def path(self, block_id: bytes) -> str:
        """Of a block's file, whether it is there or not."""
        return self.folder.block_path(block_id)

    def add(self, block_id: bytes, used: int) -> None:
        """A block is here now. used: when it was used last."""
        with self._changing:
            self.blocks[block_id] = used

    def forget(self, block_id: bytes) -> bool:
        """A block is not here any more. False when that was known."""
        with self._changing:
            if self.blocks.pop(block_id, None) is None:
                return False
        self._note(block_id)
        return True

    def _note(self, block_id: bytes) -> None:
        if self._changed is not None:
            self._changed.append(block_id)

    def oldest(self, count: int) -> list[tuple[bytes, int]]:
        """The longest unused blocks, at most so many, and their last uses."""
        with self._changing:
            return list(islice(self.blocks.items(), count))

    def _place(self, block_id: bytes, used: int, last: bool) -> None:
        """Put a block that is here at the end of the order, or at its beginning."""
        with self._changing, suppress(KeyError):  # it was removed meanwhile
            self.blocks.move_to_end(block_id, last)
            self.blocks[block_id] = used

    def used_elsewhere(self, block_id: bytes, used: int) -> None:
        """Another server used a block."""
        self._place(block_id, used, last=True)

    def find_others(self) -> None:
        """Take in what other servers stored and removed. Raises OSError."""
        there = dict.fromkeys(self.folder.block_ids())
        before = dict.fromkeys(self.blocks.copy())
        for block_id in [name for name in before if name not in there]:
            if not os.path.exists(self.path(block_id)):  # stored while the names were read
                self.forget(block_id)
        for block_id in [name for name in there if name not in before]:
            self.find(block_id)

    def find(self, block_id: bytes) -> bool:
        """Ask the disk for a block that is not known to be here. Raises OSError."""
        path = self.path(block_id)
        try:
            used = self.backend.last_use(path)
        except FileNotFoundError:
            return False
        with self._changing:
            self.blocks.setdefault(block_id, used)
        if not os.path.exists(path):  # whoever removed it meanwhile may have come before that
            self.forget(block_id)
            return False
        self._note(block_id)
        return True

    def unlink(self, folder: ModelFolder, block_id: bytes) -> bool:
        """Remove a block of any model. False when there is none. Raises OSError."""
        try:
            with self.ledger.held():
                self.backend.unlink(folder.block_path(block_id))
                self.ledger.freed(folder.file_bytes)
        except FileNotFoundError:
            return False
        finally:
            if folder == self.folder:
                self.forget(block_id)
        return True

    def take_changes(self) -> list[bytes]:
        """Identities of blocks that came or left by themselves since the last call; nothing is
        noted before the first."""
        if self._changed is None:
            self._changed = deque()
        return [self._changed.popleft() for _ in range(len(self._changed))]

    # -- use ----------------------------------------------------------------------------------

    def learn_uses(self) -> None:
        """Read from the disk when the blocks were used that were here at the start, and bring them
        into that order. Once; raises OSError."""
        if self.knows_uses:
            return
        found = dict(self.uses_in(self.folder))
        for block_id in [name for name, used in self.blocks.copy().items() if not used]:
            if block_id not in found:
                self.forget(block_id)
        names = list(found)
        times = np.fromiter(found.values(), dtype=np.int64, count=len(found))
        newest_first = np.argsort(-times, kind="stable").tolist()
        for block_id in map(names.__getitem__, newest_first):
            if self.blocks.get(block_id) == 0:
                self._place(block_id, found[block_id], last=False)
        self.knows_uses = True

    def uses_in(self, folder: ModelFolder) -> Iterator[tuple[bytes, int]]:
        """As `ModelFolder.uses`. A use that is still to come, from a clock that was ahead, becomes
        one of now, on the disk too. Raises OSError."""
        now = int(self.clock() * 1e9)
        for block_id, used in folder.uses():
            if used > now + AHEAD_NS:
                with suppress(FileNotFoundError):
                    self.backend.note_use(folder.block_path(block_id), now)
            yield block_id, min(used, now)

    def use_time(self, position: int) -> int:
        """When a block is used that is stored now, in ns since 1970: coarse on purpose, and less by
        the blocks before it, so that those of one prefix age from their end."""
        return int(self.clock() * 1e9) // NOTED_NS * NOTED_NS - position * 1000

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """See `DiskStore.touch`."""
        self._touches.append((int(self.clock() * 1e9), block_ids))

    def note_touches(self) -> None:
        """Bring what was used to the end of the order, a block before what it continues, and note
        the use on the disk unless that was done just before. Raises OSError."""
        with suppress(IndexError):  # another thread may take the last one
            while self._touches:
                when, block_ids = self._touches.popleft()
                for position in range(len(block_ids) - 1, -1, -1):
                    self._used(block_ids[position], when - position * 1000)

    def _used(self, block_id: bytes, when: int) -> None:
        before = self.blocks.get(block_id)
        if before is None or before > when:
            return
        is_noted = before + NOTED_NS > when
        self._place(block_id, before if is_noted else when, last=True)
        if not is_noted:
            try:
                self.backend.note_use(self.path(block_id), when)
            except FileNotFoundError:
                self.forget(block_id)

    def close(self) -> None:
        """Leave the directory to others."""
        self.membership.close()
        self.ledger.close()


def write_small(path: str, text: str) -> None:
    """Make a small file for people say this, whole or not at all. Raises OSError."""
    with suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        if file.read() == text:  # there may be no room to write it again
            return
    descriptor, fresh = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            os.unlink(fresh)
        raise
