"""The memory of host pool and snapshots: shared through its file, or of one process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.host_memory import HostMemory, MemorySpec, memory_file, page_setting
from sglang_hc.store.remote import Frames

LAYOUT = BlockLayout(LayerPlan(0, 1, 1), StateShape(2, 32, (16, 16), "uint8"))
SPEC = MemorySpec(LAYOUT, 4, BLOCK_TOKENS, 1)


def test_what_one_mapping_of_the_file_is_given_another_shows() -> None:
    descriptor = memory_file(SPEC)
    one, other = HostMemory(SPEC, descriptor), HostMemory(SPEC, descriptor)
    os.close(descriptor)
    one.pool.slot(3)[:] = 7
    assert (other.pool.slot(3) == 7).all() and not other.pool.slot(2).any()
    one.snapshots[0][:] = 9
    assert (other.snapshots[0] == 9).all() and (other.pool.slot(3) == 7).all()


def dumped(buffer: object) -> bool:
    """Whether the mapping at this address would be in a core dump."""
    at = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            here = int(bounds[1], 16) <= at < int(bounds[2], 16)
        elif here and line.startswith("VmFlags:"):
            return "dd" not in line.split()
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("shared", [False, True])
def test_no_core_dump_holds_the_state_of_conversations(shared: bool) -> None:
    descriptor = memory_file(SPEC) if shared else None
    memory = HostMemory(SPEC, descriptor)
    assert not dumped(memory.pool.buffer) and not dumped(memory.snapshots[0])
    assert dumped(bytearray(1 << 20)), "other memory is"
    assert not dumped(Frames(LAYOUT.slot_bytes).buffer), "nor what is on its way to a remote store"


def test_memory_without_a_file_is_its_own() -> None:
    one, other = HostMemory(SPEC), HostMemory(SPEC)
    one.pool.slot(0)[:] = 7
    assert not other.pool.slot(0).any()


@pytest.mark.parametrize("slot", [0, 127, 128, 255, 256, 4095])
def test_each_of_64_gigabytes_of_slots_is_where_the_file_has_it(slot: int) -> None:
    """Before and behind places that 31 and 32 bits can name. Only what is written takes memory."""
    layout = BlockLayout(LayerPlan(0, 0, 8), StateShape(8, 32, (1 << 14, 1 << 14), "uint8"))
    spec = MemorySpec(layout, 4096, BLOCK_TOKENS, 0)
    assert layout.slot_bytes == 16 << 20 and spec.bytes == 64 << 30
    descriptor = memory_file(spec)
    pool = HostMemory(spec, descriptor).pool
    pool.kv[1][slot, 7, BLOCK_TOKENS - 1] = 7
    row = os.pread(descriptor, 1 << 14, (slot + 1) * layout.slot_bytes - (1 << 14))
    os.close(descriptor)
    assert row == bytes([7]) * (1 << 14)
    assert pool.slot(slot)[-1] == pool.view(slot)[-1] == 7
    assert np.count_nonzero(pool.bytes[max(0, slot - 1) : slot + 2]) == 1 << 14


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("always within_size advise [never] deny force\n", "never"),
        ("always within_size [advise] never deny force\n", "advise"),
        ("nonsense", ""),
    ],
)
def test_the_setting_in_force_is_the_one_in_brackets(
    tmp_path: Path, text: str, setting: str
) -> None:
    (tmp_path / "shmem_enabled").write_text(text)
    assert page_setting(tmp_path / "shmem_enabled") == setting
    assert page_setting(tmp_path / "missing") == ""
