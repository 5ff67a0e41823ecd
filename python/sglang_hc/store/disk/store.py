"""The disk store: blocks of one model over one or several directories.

A block lies whole in one file of one directory. A directory that failed, or whose I/O keeps
failing, is out of use: its blocks are not found, and the other directories go on. Several servers
may have a directory open.

Lookups, `touch`, `expect` and `order` are for the scheduler thread: they look into memory, never at
a disk, and wait for nobody. Reads, writes and removals are for any number of I/O threads at once.
Nothing is believed that lies on a disk: every read proves identity and digests (HCache section 4.2
for the layout, docs/disk-format.md for the bytes). Once open, trouble is an answer and a counter,
not an exception.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile

import numpy as np

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.block import Block
from sglang_hc.store.disk import erasing
from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.disk.directory import Directory, DirectoryLost, DirectorySpec, steady_time
from sglang_hc.store.disk.erasing import Erased
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.format import StoredModel
from sglang_hc.store.disk.maintenance import Maintenance, Upkeep
from sglang_hc.store.disk.opening import open_directory
from sglang_hc.store.disk.reader import BlockReader
from sglang_hc.store.disk.writer import BlockWriter, Dealer
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting

logger = logging.getLogger(__name__)

_DEFAULTS = Upkeep()


WRITES_S = 60.0
"""Waited for writes under way before something is erased. Nobody waits for their answers any more
then: their tier has given them up."""


class DiskStore:
    """See the module. Made by `open`; `close` it, so that others know that it is gone."""

    def __init__(
        self,
        evictors: Sequence[Evictor],
        model: StoredModel,
        uses: dict[bytes, float],
        upkeep: Upkeep,
        left_out: int = 0,
    ) -> None:
        """evictors: of the open directories. uses: that they look at. left_out: further directories
        whose devices fail."""
        self.directories = tuple(one.directory for one in evictors)
        self._left_out = left_out
        self.model = model
        self._uses = uses
        self._readers = {one: BlockReader(one) for one in self.directories}
        self.evictors = {one.directory: one for one in evictors}
        self._writer = BlockWriter(self.evictors)
        self.order = Dealer(self.directories).order
        self.maintenance = {one.directory: Maintenance(one, upkeep) for one in evictors}
        self._in_use_before: set[Directory] = set()
        if upkeep.background:
            for one in self.maintenance.values():
                one.start()

    @classmethod
    def open(
        cls,
        directories: Sequence[DirectorySpec],
        model: StoredModel,
        upkeep: Upkeep = _DEFAULTS,
        backend: DirectBackend | None = None,
        clock: Callable[[], float] = steady_time,
    ) -> DiskStore:
        """Open, and make where missing, the directories for one model.

        backend: None for the real disk. A directory whose device fails is left out, unless all
        fail. Raises DirectoryError with a message for users; nothing stays open then.
        """
        opened: list[Evictor] = []
        uses: dict[bytes, float] = {}
        try:
            for spec in directories:
                one = partial(open_directory, spec, model, uses, backend, clock)
                opened += _unless_lost(one, last=not opened and spec is directories[-1])
            return cls(opened, model, uses, upkeep, len(directories) - len(opened))
        except BaseException:
            for evictor in opened:
                evictor.directory.close()
            raise

    # -- scheduler thread ---------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Blocks that fit into all directories."""
        return sum(directory.capacity for directory in self.directories)

    def in_use(self) -> list[Directory]:
        """The directories that may be asked now: neither hanging nor paused because of failures."""
        return [directory for directory in self.directories if directory.usable()]

    def contains(self, block_ids: Sequence[bytes]) -> int:
        """How many of the first identities are here without a gap, as far as is known. A block in a
        directory that is out of use is not here. A yes is no promise: the read proves it."""
        known = [directory.blocks for directory in self.in_use()]
        if len(known) == 1:
            return len(list(takewhile(known[0].__contains__, block_ids)))
        for count, block_id in enumerate(block_ids):
            for blocks in known:
                if block_id in blocks:
                    break
            else:
                return count
        return len(block_ids)

    def directory_of(self, block_id: bytes) -> Directory | None:
        """The directory in use that has this block; None when none has."""
        for directory in self.directories:
            if block_id in directory.blocks and directory.usable():
                return directory
        return None

    def absence(self, block_id: bytes) -> Outcome:
        """The answer to a read of a block that `directory_of` does not find."""
        out = any(block_id in d.blocks for d in self.directories if not d.usable())
        return Outcome.IO_ERROR if out else Outcome.MISSING

    def __len__(self) -> int:
        return sum(len(directory.blocks) for directory in self.in_use())

    def block_ids(self) -> list[bytes]:
        """Identities of all blocks here, for whoever mirrors them from the start. One that lies in
        two directories is named twice."""
        return [name for directory in self.in_use() for name in directory.blocks.copy()]

    def take_changes(self, *, anew: bool = False) -> list[bytes]:
        """Identities of blocks that left, or that others stored, since the last call, those of
        directories that went out of use or came back too. For one caller, who mirrors what can be
        read. The first call, and one `anew`, names all that are here; nothing is noted before the
        first."""
        now = set(self.in_use())
        before, self._in_use_before = self._in_use_before, now
        if anew:
            before = set()
        changed = [name for directory in now ^ before for name in directory.blocks.copy()]
        return changed + [name for one in self.directories for name in one.take_changes()]

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """Note that a prefix path was used, wherever it was served from; identities in path order,
        so that a block never looks younger than its parent. Blocks that are not here are ignored.
        The sequence must not change afterwards.

        Costs one append for each directory in use; upkeep does the rest.
        """
        for directory in self.in_use():
            directory.touch(block_ids)

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """When waiting requests will use blocks, as far as that has changed since the last call: a
        rank, smaller is sooner, or None for no more. What is needed is evicted last, and of that
        what is needed last first. Blocks need not be here."""
        for block_id, use in uses.items():
            if use is None:
                self._uses.pop(block_id, None)
            else:
                self._uses[block_id] = use

    def counters(self) -> Counter[str]:
        """What no answer tells: sums since the store was opened."""
        return sum((directory.counters() for directory in self.directories), Counter())

    # -- I/O threads --------------------------------------------------------------------------

    @property
    def shared_with(self) -> list[Directory]:
        """Directories that other servers have open too, and that may be asked now."""
        return [one for one in self.in_use() if not one.membership.alone]

    def named(self, block_id: bytes) -> Block | None:
        """What a block says of itself; None where it is not here, or is not what it should be.
        Reads its first page alone."""
        directory = self.directory_of(block_id)
        return None if directory is None else self._readers[directory].named(block_id)

    def find(self, block_id: bytes) -> bool:
        """Whether another server has stored a block that is not known here. Asks the disk."""
        return any(_find(directory, block_id) for directory in self.shared_with)

    def write(
        self, block: Block, data: memoryview, order: Iterable[Directory] | None = None
    ) -> Outcome:
        """Store a block with its bytes, as `forms.BlockLayout` lays them out in page-aligned memory
        (O_DIRECT). The bytes must not change meanwhile. Evicts when there is no room.

        order: directories that are asked one after the other; None for `order`. After OK lookups
        see the block, and it survives the end of this process, not of the machine's power.
        """
        self._check(data)
        order = self.order(block.block_id) if order is None else order
        return self._writer.write(block, data, order)

    def read(self, block_id: bytes, into: memoryview, deadline: float | None = None) -> Outcome:
        """Fetch a block into page-aligned memory and verify it. deadline: on `time.monotonic`,
        checked between calls of the system; None for any time.

        A block that is damaged or cannot be read is removed; the next lookup says no, unless
        another directory has the block too. A late block stays.
        """
        self._check(into)
        directory = self.directory_of(block_id)
        if directory is None:
            return self.absence(block_id)
        return self._readers[directory].read(block_id, into, deadline)

    def erase(self, what: Forgetting | None) -> Erased:
        """Erase the blocks of some namespaces, of every model; None: all blocks of this model. None
        of these may be waiting to be written. Gone for good when this returns, and says so,
        whatever happens to process or power. A write that does not end in WRITES_S may bring its
        block back, so it is not said then."""
        over = self._writer.wait(WRITES_S)
        blocks, complete = erasing.erase(self.directories, what)
        return Erased(blocks, complete and over and not self._left_out)

    def tick(self) -> None:
        """One round of upkeep in every directory."""
        for one in self.maintenance.values():
            one.tick()

    def close(self) -> None:
        """Finish upkeep and leave the directories. No other call may be running."""
        for directory in self.directories:
            self.close_directory(directory)

    def close_directory(self, directory: Directory) -> None:
        """As `close`, of one: a directory that hangs does not come back from here."""
        self.maintenance[directory].stop()
        if directory.usable():
            with suppress(OSError):
                directory.note_touches()
        directory.close()

    def _check(self, data: memoryview) -> None:
        if data.format != "B" or len(data) < self.model.block_bytes:
            raise ValueError(f"{data.nbytes} bytes for a block of {self.model.block_bytes}")
        if np.frombuffer(data, dtype=np.uint8).ctypes.data % CHUNK_ALIGN:
            raise ValueError("a block's memory must start at a page")


def _find(directory: Directory, block_id: bytes) -> bool:
    try:
        return directory.find(block_id)
    except OSError as error:
        directory.io_failed(error)
        return False


def _unless_lost(opening: Callable[[], Evictor], last: bool) -> list[Evictor]:
    """The directory, if its device works. last: there is no other one, so that the error is raised.
    Raises DirectoryError."""
    try:
        return [opening()]
    except DirectoryLost as error:
        if last:
            raise
        logger.error("%s. The other directories are used without it", error)
        return []
