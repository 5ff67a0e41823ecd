"""Host memory with an executor and, if wanted, a disk below it: on threads or in a process."""

from __future__ import annotations

import os
from collections import Counter
from typing import NamedTuple

from sglang_hc.store.block_io import OwnDisk
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.executor import Executor, ThreadExecutor
from sglang_hc.store.host_memory import HostMemory, MemorySpec, memory_file
from sglang_hc.store.process.clients import ProcessBlocks, ProcessExecutor
from sglang_hc.store.process.messages import DiskSpec, Setup
from sglang_hc.store.process.supervisor import IoSupervisor


class Io(NamedTuple):
    """blocks: None without a disk tier. counts: of both, and for whoever owns them. Close `blocks`
    and then `executor`."""

    memory: HostMemory
    executor: Executor
    blocks: OwnDisk | None
    counts: Counter[str]


def open_io(kind: str, memory: MemorySpec, disk: DiskSpec | None) -> Io:
    """`kind`: `process` or `thread`.

    Raises DirectoryError with a message for users, OSError when the process cannot be started.
    """
    return _in_process(memory, disk) if kind == "process" else _on_threads(memory, disk)


def _on_threads(spec: MemorySpec, disk: DiskSpec | None) -> Io:
    memory = HostMemory(spec)
    counts: Counter[str] = Counter()
    blocks: OwnDisk | None = None
    if disk is not None:
        blocks = DiskThreads(disk.open(spec.layout), memory.pool, counts)
    return Io(memory, ThreadExecutor(memory.pool, memory.snapshots), blocks, counts)


def _in_process(spec: MemorySpec, disk: DiskSpec | None) -> Io:
    descriptor = memory_file(spec)
    counts: Counter[str] = Counter()
    try:
        supervisor = IoSupervisor(Setup(spec, disk), descriptor, counts)
        memory = HostMemory(spec, descriptor)
        executor = ProcessExecutor(supervisor, memory)
        blocks = ProcessBlocks(supervisor) if disk is not None else None
        supervisor.start()
    except BaseException:
        os.close(descriptor)
        raise
    return Io(memory, executor, blocks, counts)
