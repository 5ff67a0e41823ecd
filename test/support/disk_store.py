"""What the tests of the disk store share: a small model, blocks with known bytes, and backends that
lose power, fail, cut reads short or are slow."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.backend import DirectBackend, DirectFile, File, aligned_buffer
from sglang_hc.store.disk.reader import Read
from sglang_hc.store.disk.writer import Block
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import block_id, pack_tokens, root_id

LAYOUT = BlockLayout(LayerPlan(1, 3, 2), StateShape(6, 64, (64, 64), "float16"))
"""3 HIDDEN chunks of 4 KiB (layers 1 to 3), 2 KV chunks of 8 KiB (layers 4 and 5)."""
FINGERPRINT = LAYOUT.fingerprint("tiny")
SMALL = 6_000_000
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
    layout: BlockLayout = LAYOUT, fingerprint: bytes = FINGERPRINT,
    clock: Callable[[], float] = time.time, **upkeep: object,
) -> DiskStore:  # fmt: skip
    """Store without a background thread unless asked for. upkeep: fields of `Upkeep`."""
    return DiskStore.open(
        [DirectorySpec(str(path), size) for path in paths],
        StoredModel.of(layout.chunks(), fingerprint, "tiny"),
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


def read_bytes(store: DiskStore, name: bytes) -> tuple[object, np.ndarray]:
    """(status, bytes read)."""
    into = empty_slot()
    return read_block(store, name, into), into


def total_bytes(folder: Path) -> int:
    """Sizes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# -- faults ---------------------------------------------------------------------------------------


@dataclass
class Faults:
    """What goes wrong, changed while the store runs. Each hook may raise or sleep.

    on_range: as on_read, for reads of bytes [begin, end) of a file. short: bytes a read loses at
    its end. bytes_per_second: for each reader and writer.
    """

    on_read: Callable[[str], None] = lambda path: None
    on_range: Callable[[str, int, int], None] = lambda path, begin, end: None
    on_write: Callable[[str], None] = lambda path: None
    short: int = 0
    bytes_per_second: float = float("inf")


def failing(code: int) -> Callable[[str], None]:
    """Hook that raises OSError with this errno."""

    def raise_it(path: str) -> None:
        raise OSError(code, os.strerror(code), path)

    return raise_it


class FaultyBackend(DirectBackend):
    """Real files with faults in between."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(direct=False)
        self.faults = faults

    def _open(self, path: str, flags: int) -> File:
        return _FaultyFile(super()._open(path, flags), path, self.faults)


class _FaultyFile:
    def __init__(self, file: DirectFile, path: str, faults: Faults) -> None:
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


EIO = failing(errno.EIO)
ENOSPC = failing(errno.ENOSPC)


# -- power cuts -----------------------------------------------------------------------------------


@dataclass
class _Durable:
    """What one file surely holds, and what was written since its last sync, in order."""

    content: bytearray | None  # None: the name itself is not durable yet
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    size: int = 0


class CrashBackend(DirectBackend):
    """Real files, and beside them what a power cut at this moment would leave of them.

    `event` is called with the kind of what happens at every write, allocation, creation and
    removal of a file, and before and after every sync.
    """

    def __init__(self, event: Callable[[str], None]) -> None:
        super().__init__(direct=False)
        self.event = event
        self.files: dict[str, _Durable] = {}
        self.limbo: dict[str, _Durable] = {}

    def open(self, path: str, create: bool = False) -> File:
        file = super().open(path, create)
        if create:
            self.files[path] = _Durable(None)
            self.event("create")
        elif path not in self.files:
            self.files[path] = _Durable(bytearray(Path(path).read_bytes()), size=file.size())
        return _CrashFile(file, self.files[path], self)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        record = self.files.pop(path, None)
        if record is not None and record.content is not None:
            self.limbo[path] = record
        self.event("remove")

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        for name, record in self.files.items():
            if os.path.dirname(name) == path and record.content is None:
                record.content = bytearray()
        self.limbo = {n: r for n, r in self.limbo.items() if os.path.dirname(n) != path}
        self.event("sync directory")

    def leave(self, target: Callable[[str], str], rng: random.Random) -> None:
        """Write what a power cut leaves of every file to where `target` says. Of what was not
        synced, each write is kept, lost, or torn at any of its 512-byte sectors."""
        for path, record in (self.files | self.limbo).items():
            if record.content is None and rng.random() < 0.5:
                continue  # the creation itself was lost
            content = bytearray(record.content or b"")
            for offset, data in record.pending:
                _apply(content, offset, data, rng)
            if len(content) < record.size and (record.pending or rng.random() < 0.5):
                content.extend(bytes(record.size - len(content)))
            Path(target(path)).write_bytes(content)


class _CrashFile:
    def __init__(self, file: DirectFile, record: _Durable, backend: CrashBackend) -> None:
        self._file = file
        self._record = record
        self._backend = backend

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._file.read(buffers, offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._record.pending.append((offset, b"".join(bytes(b) for b in buffers)))
        self._backend.event("write")
        self._file.write(buffers, offset)

    def sync(self) -> None:
        self._backend.event("before sync")
        self._file.sync()
        record = self._record
        content = bytearray() if record.content is None else record.content
        if len(content) < record.size:
            content.extend(bytes(record.size - len(content)))
        for offset, data in record.pending:
            content[offset : offset + len(data)] = data
        record.pending.clear()
        if record.content is None:
            # Data of a file whose name is not durable: it counts once the directory is synced.
            record.pending.append((0, bytes(content)))
        self._backend.event("after sync")

    def allocate(self, size: int) -> None:
        self._file.allocate(size)
        self._record.size = max(self._record.size, size)
        self._backend.event("allocate")

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()


def _apply(content: bytearray, offset: int, data: bytes, rng: random.Random) -> None:
    fate = rng.choice(("kept", "lost", "torn"))
    if fate == "lost":
        return
    if len(content) < offset + len(data):
        content.extend(bytes(offset + len(data) - len(content)))
    for start in range(0, len(data), 512):
        if fate == "kept" or rng.random() < 0.5:
            content[offset + start : offset + start + 512] = data[start : start + 512]


def copy_index(source: Path, target: Path, log_bytes: int | None) -> None:
    """Copy a live index as a power cut leaves it: the log cut off at `log_bytes`."""
    shutil.copyfile(source, target)
    log = Path(f"{source}-wal")
    if log.exists():
        content = log.read_bytes()
        Path(f"{target}-wal").write_bytes(content if log_bytes is None else content[:log_bytes])
