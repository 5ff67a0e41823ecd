"""Host memory with an executor and, if wanted, directories below it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from sglang_hc.forms import BlockLayout
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block_io import LocalBlockIo
from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.executor import Executor, ThreadExecutor
from sglang_hc.store.host_memory import HostMemory, MemorySpec
from sglang_hc.store.host_pool import HostPool


@dataclass(frozen=True)
class DiskSpec:
    """The disk tier of one model; see `StoredModel` and `Upkeep`. key: of the blocks' MACs; None
    for none."""

    directories: tuple[DirectorySpec, ...]
    fingerprint: bytes
    label: str
    part: bytes
    ttl_s: float | None = None
    key: bytes | None = None

    def model(self, layout: BlockLayout) -> StoredModel:
        """Whose blocks these are."""
        chunks, part = layout.chunks(), self.part
        return StoredModel.of(chunks, self.fingerprint, self.label, part, self.key)

    def open(self, layout: BlockLayout) -> DiskStore:
        """Raises DirectoryError with a message for users."""
        upkeep = Upkeep(self.ttl_s)
        return DiskStore.open(self.directories, self.model(layout), upkeep)


class Io(NamedTuple):
    """blocks: None without a disk tier. counts: of the disk, and for whoever owns it. Close
    `blocks` and then `executor`."""

    memory: HostMemory
    executor: Executor
    blocks: LocalBlockIo | None
    counts: Counter[str]


def open_io(memory: MemorySpec, disk: DiskSpec | None) -> Io:
    """Raises DirectoryError with a message for users."""
    host, counts = HostMemory(memory), Counter[str]()
    blocks = None if disk is None else open_directories(disk, host.pool, counts)
    return Io(host, ThreadExecutor(host.pool, host.snapshots), blocks, counts)


def open_directories(
    spec: DiskSpec, pool: HostPool, counts: Counter[str], tier: SourceTier = SourceTier.DISK
) -> LocalBlockIo:
    """The store of some directories, as this tier. Raises DirectoryError."""
    return DiskThreads(spec.open(pool.layout), pool, counts, tier=tier)
