"""The memory of host pool and snapshots: shared through its file, or of one process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.host_memory import HostMemory, MemorySpec, memory_file, page_setting

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
