"""The memory of host pool and snapshots."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.host_memory import HostMemory, MemorySpec
from sglang_hc.store.remote import Frames

LAYOUT = BlockLayout(LayerPlan(0, 1, 1), StateShape(2, 32, (16, 16), "uint8"))
SPEC = MemorySpec(LAYOUT, 4, BLOCK_TOKENS, 1)


def flags_of(buffer: object) -> set[str]:
    """What the system says of the mapping at this address."""
    at = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            here = int(bounds[1], 16) <= at < int(bounds[2], 16)
        elif here and line.startswith("VmFlags:"):
            return set(line.split())
    raise AssertionError("no such mapping")


def test_no_core_dump_and_no_forked_process_has_the_state_of_conversations() -> None:
    """What a child shares, a read by O_DIRECT that is under way might miss: the parent's next write
    to the page takes it elsewhere."""
    memory = HostMemory(SPEC)
    state = (memory.pool.buffer, memory.snapshots[0], Frames(4096, LAYOUT.slot_bytes).buffer)
    assert all("dd" in flags_of(buffer) for buffer in state)
    assert "dd" not in flags_of(bytearray(1 << 20)), "other memory is"
    assert all("dc" in flags_of(buffer) for buffer in state[:2])


def test_pool_and_snapshots_do_not_overlap() -> None:
    memory = HostMemory(SPEC)
    memory.pool.bytes[:] = 7
    assert not memory.snapshots[0].any()
    memory.snapshots[0][:] = 9
    assert (memory.pool.bytes == 7).all()


@pytest.mark.parametrize("slot", [0, 127, 128, 255, 256, 319])
def test_each_of_5_gigabytes_of_slots_has_its_place(slot: int) -> None:
    """Before and behind places that 31 and 32 bits can name. Only what is written takes memory."""
    layout = BlockLayout(LayerPlan(0, 0, 8), StateShape(8, 32, (1 << 14, 1 << 14), "uint8"))
    spec = MemorySpec(layout, 320, BLOCK_TOKENS, 0)
    assert layout.slot_bytes == 16 << 20 and spec.bytes == 5 << 30
    pool = HostMemory(spec).pool
    pool.kv[1][slot, 7, BLOCK_TOKENS - 1] = 7
    end = (slot + 1) * layout.slot_bytes
    assert memoryview(pool.buffer)[end - (1 << 14) : end] == bytes([7]) * (1 << 14)
    assert pool.slot(slot)[-1] == pool.view(slot)[-1] == 7
    assert np.count_nonzero(pool.bytes[max(0, slot - 1) : slot + 2]) == 1 << 14
