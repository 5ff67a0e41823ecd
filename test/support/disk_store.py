"""What the tests of the disk store share: a small model, blocks with known bytes, and a backend
that fails, cuts reads short, is slow or has little room."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.block import Block
from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.backend import DirectBackend, File, aligned_buffer
from sglang_hc.store.disk.folders import model_folders
from sglang_hc.store.disk.format import WHOLE
from sglang_hc.store.disk.sharing import NEW, Ledger
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import block_id, pack_tokens, root_id

LAYOUT = BlockLayout(LayerPlan(1, 3, 2), StateShape(6, 64, (64, 64), "float16"))
"""3 HIDDEN chunks of 4 KiB (layers 1 to 3), 2 KV chunks of 8 KiB (layers 4 and 5)."""
FINGERPRINT = LAYOUT.fingerprint("tiny")
FILE = StoredModel.of(LAYOUT.chunks(), FINGERPRINT, "tiny").file_bytes
"""Bytes of a block's file: one page of header, and the chunks."""
SMALL = 183 * FILE
"""Budget of most tests."""
BUFFERED = DirectBackend(direct=False)

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where tests that need no real disk have their folders; None for the usual place."""


def make_path(
    count: int,
    seed: int = 0,
    namespace: str | None = None,
    fingerprint: bytes = FINGERPRINT,
    behind: Block | None = None,
) -> list[Block]:
    """Blocks of one prefix path, with real chain identities. behind: the block that they
    continue."""
    rng = random.Random(seed)
    parent = root_id(fingerprint, namespace) if behind is None else behind.block_id
    blocks = []
    first = 0 if behind is None else behind.position + 1
    for position in range(first, first + count):
        tokens = pack_tokens([rng.randrange(32000) for _ in range(BLOCK_TOKENS)])
        name = block_id(fingerprint, parent, tokens)
        blocks.append(Block(name, parent, namespace or "", position, tokens))
        parent = name
    return blocks


def names_of(blocks: Sequence[Block]) -> list[bytes]:
    return [block.block_id for block in blocks]


def data_of(block: Block | bytes, size: int = LAYOUT.slot_bytes) -> np.ndarray:
    """The bytes a block has in every test: they follow from its identity."""
    name = block if isinstance(block, bytes) else block.block_id
    rng = np.random.default_rng(int.from_bytes(name, "big"))
    data = empty_slot(size)
    data[:] = rng.integers(0, 256, size, dtype=np.uint8)
    return data


def empty_slot(size: int = LAYOUT.slot_bytes) -> np.ndarray:
    """Zeros at a page of their own, as the slots of a host tier are."""
    return np.frombuffer(aligned_buffer(size), dtype=np.uint8)


def open_store(
    *paths: Path, size: int | None = SMALL, backend: DirectBackend | None = None,
    layout: BlockLayout = LAYOUT, fingerprint: bytes = FINGERPRINT, part: bytes = WHOLE,
    clock: Callable[[], float] = time.time, users: int = 1, key: bytes | None = None,
    **upkeep: object,
) -> DiskStore:  # fmt: skip
    """Store without a background thread unless asked for. upkeep: fields of `Upkeep`."""
    return DiskStore.open(
        [DirectorySpec(str(path), size, users) for path in paths],
        StoredModel.of(layout.chunks(), fingerprint, "tiny", part, key),
        Upkeep(**{"background": False, **upkeep}),  # type: ignore[arg-type]
        backend,
        clock,
    )


def store_of(core: Any) -> DiskStore:
    """The store of a server's disk, under all that stands around it."""
    part = core.tree.tiers.disk._io
    while not isinstance(part, DiskStore):
        around = vars(part)
        part = next(around[name] for name in ("_io", "_near", "_inner", "_store") if name in around)
    return part


def put(store: DiskStore, blocks: Sequence[Block]) -> list[Outcome]:
    """Write blocks with their bytes, one after the other."""
    size = store.model.block_bytes
    return [store.write(block, memoryview(data_of(block, size))) for block in blocks]


def remove(store: DiskStore, names: Sequence[bytes]) -> int:
    """Remove blocks from all directories; returns how many."""
    return sum(one.unlink(one.folder, name) for one in store.directories for name in names)


def read_block(
    store: DiskStore,
    name: bytes,
    into: np.ndarray,
    deadline: float | None = None,
) -> Outcome:
    """Read one block."""
    return store.read(name, memoryview(into), deadline)


def read_bytes(store: DiskStore, name: bytes) -> tuple[Outcome, np.ndarray]:
    """(outcome, bytes read)."""
    into = empty_slot(store.model.block_bytes)
    return read_block(store, name, into), into


def is_served(store: DiskStore, block: Block | bytes) -> bool:
    """Whether a block is served; with its own bytes, or the test fails."""
    name = block if isinstance(block, bytes) else block.block_id
    outcome, got = read_bytes(store, name)
    right = np.array_equal(got, data_of(name, store.model.block_bytes))
    assert outcome is not Outcome.OK or right, "wrong bytes were served"
    return outcome is Outcome.OK


def block_files(folder: Path) -> Iterator[Path]:
    """Files of blocks in a directory: stored and being written."""
    root = folder / "sglang-hc"
    for where in model_folders(str(root)):
        yield from (path for path in Path(where.path).glob("?/?/*") if path.is_file())
    yield from (root / NEW).iterdir()


def file_bytes(folder: Path) -> int:
    """What the files of blocks in a directory really take."""
    total = 0
    for path in block_files(folder):
        with suppress(FileNotFoundError):  # evicted meanwhile
            total += path.stat().st_size
    return total


def bytes_at_a_moment(folder: Path) -> int:
    """As `file_bytes`, while servers are at work: nothing comes or goes meanwhile."""
    with closing(Ledger(str(folder / "sglang-hc"))) as ledger, ledger.held():
        return file_bytes(folder)


def path_of_block(store: DiskStore, block: Block | bytes) -> Path:
    """Of a block's file in the first directory that knows it."""
    name = block if isinstance(block, bytes) else block.block_id
    return Path(next(one for one in store.directories if name in one.blocks).path(name))


def flip(path: Path, at: int) -> None:
    """Change a byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def spoil_pages(path: Path, header: bool = True) -> None:
    """A byte of each page of a file is another one. header: of its first page too."""
    content = bytearray(path.read_bytes())
    for place in range(700 if header else 4096 + 700, len(content), 4096):
        content[place] ^= 1
    path.write_bytes(content)


def check_ledgers(store: DiskStore) -> None:
    """What servers believe that files take is what they take, when nobody is at work."""
    for directory in store.directories:
        with directory.ledger.held():
            used = directory.ledger.used
        assert used == file_bytes(Path(directory.root).parent)


# -- faults ---------------------------------------------------------------------------------------

Hook = Callable[[str], None]


def nothing(path: str) -> None:
    """A hook that lets everything through."""


@dataclass
class Faults:
    """What goes wrong, changed while the store runs. Each hook gets a path, and may raise or sleep.

    on_range: as on_read, for reads of bytes [begin, end) of a file. on_stat, on_note: a use is
    asked for, or noted. on_sync: of a folder. on_free: a folder's room is asked for. on_rename:
    gets the new name, on_take the old one. short: bytes a read loses at its end. bytes_per_second:
    for each reader and writer. free: bytes that the file system has; None for those that it really
    has.
    """

    on_read: Hook = nothing
    on_range: Callable[[str, int, int], None] = lambda path, begin, end: None
    on_write: Hook = nothing
    on_sync: Hook = nothing
    on_open: Hook = nothing
    on_create: Hook = nothing
    on_rename: Hook = nothing
    on_take: Hook = nothing
    on_unlink: Hook = nothing
    on_stat: Hook = nothing
    on_note: Hook = nothing
    on_free: Hook = nothing
    short: int = 0
    bytes_per_second: float = float("inf")
    free: int | None = None


HOOKS = ("read", "write", "sync", "open", "create", "rename", "unlink", "stat", "note")


def failing(code: int) -> Hook:
    """Hook that raises OSError with this errno."""

    def raise_it(path: str) -> None:
        raise OSError(code, os.strerror(code), path)

    return raise_it


EIO = failing(errno.EIO)
ENOSPC = failing(errno.ENOSPC)


def only_in(where: str, hook: Hook) -> Hook:
    """The hook for paths with this in them."""
    return lambda path: hook(path) if where in path else None


class FaultyBackend(DirectBackend):
    """Real files with faults in between."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(direct=False)
        self.faults = faults

    def open(self, path: str) -> File:
        self.faults.on_open(path)
        return _FaultyFile(super().open(path), path, self.faults)

    def create(self, path: str) -> File:
        self.faults.on_create(path)
        return _FaultyFile(super().create(path), path, self.faults)

    def reuse(self, path: str) -> File:
        self.faults.on_create(path)
        return _FaultyFile(super().reuse(path), path, self.faults)

    def rename(self, path: str, target: str) -> None:
        self.faults.on_take(path)
        self.faults.on_rename(target)
        super().rename(path, target)

    def unlink(self, path: str) -> None:
        self.faults.on_unlink(path)
        super().unlink(path)

    def last_use(self, path: str) -> int:
        self.faults.on_stat(path)
        return super().last_use(path)

    def note_use(self, path: str, when: int) -> None:
        self.faults.on_note(path)
        super().note_use(path, when)

    def free_bytes(self, path: str) -> int:
        self.faults.on_free(path + "/")
        return super().free_bytes(path) if self.faults.free is None else self.faults.free

    def sync_directory(self, path: str) -> None:
        self.faults.on_sync(path)
        super().sync_directory(path)


def open_with(faults: Faults, clock: Callable[[], float] | None = None) -> None:
    """Stores that a server opens in this process from now on, a child of a test, have these
    faults."""
    opened, given = DiskStore.open, {} if clock is None else {"clock": clock}
    DiskStore.open = lambda *args: opened(*args, backend=FaultyBackend(faults), **given)


class _FaultyFile:
    def __init__(self, file: File, path: str, faults: Faults) -> None:
        self._file = file
        self._path = path
        self._faults = faults

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._faults.on_read(self._path)
        self._faults.on_range(self._path, offset, offset + sum(map(len, buffers)))
        time.sleep(sum(map(len, buffers)) / self._faults.bytes_per_second)
        return max(0, self._file.read(buffers, offset) - self._faults.short)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._faults.on_write(self._path)
        time.sleep(sum(map(len, buffers)) / self._faults.bytes_per_second)
        self._file.write(buffers, offset)

    def close(self) -> None:
        self._file.close()
