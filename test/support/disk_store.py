"""What the tests of the disk store share: a small model, blocks with known bytes, and a backend that
fails, cuts reads short or is slow."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import Block, DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.backend import DirectBackend, File, aligned_buffer
from sglang_hc.store.disk.format import WHOLE
from sglang_hc.store.disk.reader import Read
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import block_id, pack_tokens, root_id

LAYOUT = BlockLayout(LayerPlan(1, 3, 2), StateShape(6, 64, (64, 64), "float16"))
"""3 HIDDEN chunks of 4 KiB (layers 1 to 3), 2 KV chunks of 8 KiB (layers 4 and 5)."""
FINGERPRINT = LAYOUT.fingerprint("tiny")
MODEL = StoredModel.of(LAYOUT.chunks(), FINGERPRINT, "tiny")
FILE = MODEL.file_bytes
SMALL = 60 * FILE
"""Budget that leaves room for a few dozen blocks."""

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where tests that need no real disk have their folders; None for the usual place."""


def make_path(
    count: int, seed: int = 0, namespace: str | None = None, fingerprint: bytes = FINGERPRINT
) -> list[Block]:
    """Blocks of one prefix path, with real chain identities."""
    rng = random.Random(seed)
    parent = root_id(fingerprint, namespace)
    blocks = []
    for position in range(count):
        tokens = pack_tokens([rng.randrange(32000) for _ in range(BLOCK_TOKENS)])
        name = block_id(fingerprint, parent, tokens)
        blocks.append(Block(name, parent, namespace or "", position, tokens))
        parent = name
    return blocks


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
    clock: Callable[[], float] = time.time, **upkeep: object,
) -> DiskStore:  # fmt: skip
    """Store without a background thread unless asked for. upkeep: fields of `Upkeep`."""
    return DiskStore.open(
        [DirectorySpec(str(path), size) for path in paths],
        StoredModel.of(layout.chunks(), fingerprint, "tiny", part),
        Upkeep(**{"background": False, **upkeep}),
        backend,
        clock,
    )


def put(store: DiskStore, blocks: Sequence[Block]) -> list[Outcome]:
    """Write blocks with their bytes."""
    return [store.write(block, memoryview(data_of(block))) for block in blocks]


def remove(store: DiskStore, names: Sequence[bytes]) -> int:
    """Remove blocks from all directories; returns how many."""
    return sum(directory.remove(names) for directory in store.directories)


def read_block(
    store: DiskStore,
    name: bytes,
    into: np.ndarray,
    layers: Sequence[int] | None = None,
    deadline: float | None = None,
) -> Outcome:
    """Read one block, or some layers of it."""
    return store.read(Read(name, memoryview(into), layers, deadline))


def read_bytes(store: DiskStore, name: bytes) -> tuple[Outcome, np.ndarray]:
    """(outcome, bytes read)."""
    into = empty_slot()
    return read_block(store, name, into), into


def is_served(store: DiskStore, block: Block) -> bool:
    """Whether a block is read. Fails where other bytes are read than its own."""
    outcome, got = read_bytes(store, block.block_id)
    assert outcome is not Outcome.OK or np.array_equal(got, data_of(block))
    return outcome is Outcome.OK


def files_in(folder: Path) -> list[Path]:
    """Of blocks, those included that are being written."""
    root = folder / "sglang-hc"
    return [path for path in root.rglob("*") if path.is_file() and path.stat().st_size >= FILE]


def path_of(store: DiskStore, block: Block) -> Path:
    """Of a block's file in the directory that has it."""
    directory = store.directory_of(block.block_id)
    assert directory is not None
    return Path(directory.path(block.block_id))


def check_account(store: DiskStore) -> None:
    """For a quiet moment: what the ledger says is what the files take, and what is known is there.
    Every file is a block of the model."""
    for directory in store.directories:
        files = files_in(Path(directory.root).parent)
        with directory.ledger.held():
            assert directory.ledger.used in (None, len(files) * FILE)
        assert all(os.path.exists(directory.path(name)) for name in directory.blocks)


# -- faults ---------------------------------------------------------------------------------------


@dataclass
class Faults:
    """What goes wrong, changed while the store runs. Each hook gets a path, and may raise or sleep.

    on_range: as on_read, for reads of bytes [begin, end) of a file. short: bytes a read loses at
    its end. bytes_per_second: for each reader and writer.
    """

    on_open: Callable[[str], None] = lambda path: None
    on_read: Callable[[str], None] = lambda path: None
    on_range: Callable[[str, int, int], None] = lambda path, begin, end: None
    on_create: Callable[[str], None] = lambda path: None
    on_write: Callable[[str], None] = lambda path: None
    on_rename: Callable[[str], None] = lambda path: None
    on_unlink: Callable[[str], None] = lambda path: None
    on_use: Callable[[str], None] = lambda path: None
    on_sync: Callable[[str], None] = lambda path: None
    short: int = 0
    bytes_per_second: float = float("inf")


def failing(code: int) -> Callable[[str], None]:
    """Hook that raises OSError with this errno."""

    def raise_it(path: str) -> None:
        raise OSError(code, os.strerror(code), path)

    return raise_it


EIO = failing(errno.EIO)
ENOSPC = failing(errno.ENOSPC)


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
        self.faults.on_open(path)
        return _FaultyFile(super().reuse(path), path, self.faults)

    def rename(self, path: str, target: str) -> None:
        self.faults.on_rename(target)
        super().rename(path, target)

    def unlink(self, path: str) -> None:
        self.faults.on_unlink(path)
        super().unlink(path)

    def last_use(self, path: str) -> int:
        self.faults.on_use(path)
        return super().last_use(path)

    def note_use(self, path: str, when: int) -> None:
        self.faults.on_use(path)
        super().note_use(path, when)

    def sync_directory(self, path: str) -> None:
        self.faults.on_sync(path)
        super().sync_directory(path)


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
