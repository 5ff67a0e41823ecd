"""Host memory with an executor and, if wanted, a disk below it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from sglang_hc.forms import BlockLayout
from sglang_hc.store.block_io import OwnDisk
from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.executor import Executor, ThreadExecutor
from sglang_hc.store.host_memory import HostMemory, MemorySpec


@dataclass(frozen=True)
class DiskSpec:
    """The disk tier of one model; see `StoredModel` and `Upkeep`."""

    directories: tuple[DirectorySpec, ...]
    fingerprint: bytes
    label: str
    part: bytes
    ttl_s: float | None = None

    def open(self, layout: BlockLayout) -> DiskStore:
        """Raises DirectoryError with a message for users."""
        model = StoredModel.of(layout.chunks(), self.fingerprint, self.label, self.part)
        upkeep = Upkeep(self.ttl_s)
        return DiskStore.open(self.directories, model, upkeep)


class Io(NamedTuple):
    """blocks: None without a disk tier. counts: of the disk, and for whoever owns it. Close
    `blocks` and then `executor`."""

    memory: HostMemory
    executor: Executor
    blocks: OwnDisk | None
    counts: Counter[str]


def open_io(memory: MemorySpec, disk: DiskSpec | None) -> Io:
    """Raises DirectoryError with a message for users."""
    host, counts = HostMemory(memory), Counter[str]()
    store = None if disk is None else disk.open(memory.layout)
    blocks = None if store is None else DiskThreads(store, host.pool, counts)
    return Io(host, ThreadExecutor(host.pool, host.snapshots), blocks, counts)
