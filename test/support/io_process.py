"""An I/O process and its parent's side of it, as tests drive them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.disk import Block, DirectorySpec
from sglang_hc.store.host_memory import MemorySpec
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.process.messages import DiskSpec
from sglang_hc.store.process.opening import Io
from sglang_hc.store.process.supervisor import IoSupervisor
from support import waiting
from support.disk_store import FINGERPRINT, LAYOUT, SMALL, data_of
from support.waiting import in_time

SLOTS = 64
MEMORY = MemorySpec(LAYOUT, SLOTS, BLOCK_TOKENS, 2)


def disk_spec(*folders: Path) -> DiskSpec:
    specs = tuple(DirectorySpec(str(folder), SMALL) for folder in folders)
    return DiskSpec(specs, FINGERPRINT, "tiny", 0)


def close(io: Io) -> None:
    if io.blocks is not None:
        io.blocks.close()
    io.executor.close()


def supervisor(io: Io) -> IoSupervisor:
    return io.executor.supervisor


def pid_of(io: Io) -> int:
    pid = supervisor(io).pid
    assert pid is not None
    return pid


def until(what: Callable[[], object], io: Io) -> None:
    """Poll until something is true."""
    waiting.until(what, io.executor.poll)


def answers(io: Io, count: int) -> list:
    done: list = []
    until(lambda: done.extend(io.blocks.poll()) or len(done) >= count, io)
    return done


def save(io: Io, blocks: list[Block], first_slot: int = 0) -> None:
    for slot, block in enumerate(blocks, start=first_slot):
        io.memory.pool.slot(slot)[:] = data_of(block)
        assert io.blocks.write(slot, block, slot, in_time())
    assert {done.outcome for done in answers(io, len(blocks))} == {Outcome.OK}


def check_read(io: Io, blocks: list[Block], first_slot: int = 32) -> None:
    for slot, block in enumerate(blocks, start=first_slot):
        io.memory.pool.slot(slot)[:] = 0
        io.blocks.read(slot, block.block_id, slot, in_time())
    assert {done.outcome for done in answers(io, len(blocks))} == {Outcome.OK}
    for slot, block in enumerate(blocks, start=first_slot):
        assert np.array_equal(io.memory.pool.slot(slot), data_of(block))


def names(blocks: list[Block]) -> list[bytes]:
    return [block.block_id for block in blocks]
