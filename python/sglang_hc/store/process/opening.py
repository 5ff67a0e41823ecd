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
    counts: Counter[str] = Counter()
    if kind == "thread":
        there = HostMemory(memory)
        executor = ThreadExecutor(there.pool, there.snapshots)
        store = None if disk is None else disk.open(memory.layout)
        blocks = None if store is None else DiskThreads(store, there.pool, counts)
        return Io(there, executor, blocks, counts)
    descriptor = memory_file(memory)
    try:
        supervisor = IoSupervisor(Setup(memory, disk), descriptor, counts)
        shared = HostMemory(memory, descriptor)
        io = Io(
            shared,
            ProcessExecutor(supervisor, shared),
            None if disk is None else ProcessBlocks(supervisor),
            counts,
        )
        supervisor.start()
    except BaseException:
        os.close(descriptor)
        raise
    return io
