"""A directory whose blocks only servers with one key can make: who lacks it finds nothing, and what
is put there without it is removed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hc.store.disk.format import mac_key, seal_block
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    check_ledgers,
    data_of,
    flip,
    is_served,
    make_path,
    open_store,
    path_of_block,
    put,
    read_bytes,
)

BLOCKS = make_path(4)
NAMES = [block.block_id for block in BLOCKS]
KEY, OTHER = mac_key(b"k" * 32), mac_key(b"o" * 32)


def test_servers_of_other_keys_share_a_directory_and_no_block(scratch: Path) -> None:
    stores = [open_store(scratch, key=key) for key in (KEY, KEY, OTHER, None)]
    assert put(stores[0], BLOCKS) == [Outcome.OK] * 4
    found = []
    for store in stores:
        store.tick()
        store.directories[0].find_others()
        found.append(store.contains(NAMES))
    assert found == [4, 4, 0, 0]
    assert all(is_served(stores[1], block) for block in BLOCKS)
    assert not any(is_served(store, BLOCKS[0]) for store in stores[2:])
    assert not any("forged" in store.counters() for store in stores)
    check_ledgers(stores[0])
    for store in stores:
        store.close()


@pytest.mark.parametrize("forger", [None, OTHER])
def test_a_block_that_is_put_there_without_the_key_is_removed(
    scratch: Path, forger: bytes | None
) -> None:
    """By somebody who may write to the directory, and knows all names in it."""
    store = open_store(scratch, key=KEY)
    put(store, BLOCKS)
    model, path = store.model, path_of_block(store, BLOCKS[1])
    raw = bytearray(path.read_bytes())
    page, data = memoryview(raw)[: model.header_bytes], memoryview(raw)[model.header_bytes :]
    data[:] = data_of(BLOCKS[2])
    seal_block(page, data, BLOCKS[1], replace(model, key=forger), 0)
    path.write_bytes(raw)
    assert read_bytes(store, NAMES[1])[0] is Outcome.DAMAGED
    assert store.counters()["forged"] == 1
    assert not path.exists() and store.contains(NAMES) == 1
    assert put(store, BLOCKS[1:2]) == [Outcome.OK] and is_served(store, BLOCKS[1])
    store.close()


def test_another_blocks_file_under_a_name_is_not_served(scratch: Path) -> None:
    store = open_store(scratch, key=KEY)
    put(store, BLOCKS)
    shutil.copy(path_of_block(store, BLOCKS[0]), path_of_block(store, BLOCKS[1]))
    assert read_bytes(store, NAMES[1])[0] is Outcome.DAMAGED
    assert "forged" not in store.counters()
    store.close()


@pytest.mark.parametrize("at", [20, 612, 650, 4096, 5000])
def test_damage_is_found_with_a_key_too(scratch: Path, at: int) -> None:
    store = open_store(scratch, key=KEY)
    put(store, BLOCKS)
    flip(path_of_block(store, BLOCKS[3]), at)
    assert not is_served(store, BLOCKS[3]) and is_served(store, BLOCKS[2])
    store.close()
