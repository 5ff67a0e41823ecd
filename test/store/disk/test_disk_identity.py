"""State of another model, plan, dtype, namespace, salt, LoRA or key is never served from disk."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.block import Block
from sglang_hc.store.disk.format import mac_key, seal_block
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import block_id, pack_tokens, root_id
from support.disk_store import (
    BUFFERED,
    MEMORY,
    check_ledgers,
    data_of,
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

WORLDS = st.tuples(
    st.sampled_from(["llama", "qwen"]),
    st.sampled_from(["bfloat16", "float16"]),
    st.sampled_from([(0, 2, 0), (0, 1, 1), (1, 1, 0)]),
    st.sampled_from([None, "", "salt-a", "salt-b", "lora:x"]),
    st.integers(0, 2),
)


def world_block(world: tuple) -> tuple[BlockLayout, bytes, Block]:
    """Layout, fingerprint and the second block of a prefix in this model, plan and namespace."""
    model, dtype, counts, namespace, seed = world
    layout = BlockLayout(LayerPlan(*counts), StateShape(2, 64, (64, 64), dtype))
    fingerprint = layout.fingerprint(model)
    parent = root_id(fingerprint, namespace)
    for position in range(2):
        tokens = pack_tokens([seed * (1 - position)] * BLOCK_TOKENS)
        name, before = block_id(fingerprint, parent, tokens), parent
        parent = name
    return layout, fingerprint, Block(name, before, namespace or "", 1, tokens)


@settings(max_examples=15, deadline=None)
@given(st.lists(WORLDS, min_size=2, max_size=4, unique=True))
def test_worlds_do_not_see_each_other(worlds: list[tuple]) -> None:
    """Each world writes its block into one shared directory; only its own comes back, although the
    last block has the same tokens everywhere."""
    made = [world_block(world) for world in worlds]
    assert all(a[2].block_id != b[2].block_id for a, b in combinations(made, 2))
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        for layout, fingerprint, block in made:
            options = {"layout": layout, "fingerprint": fingerprint}
            store = open_store(Path(folder), backend=BUFFERED, **options)
            assert put(store, [block]) == [Outcome.OK]
            store.close()
        for layout, fingerprint, block in made:
            options = {"layout": layout, "fingerprint": fingerprint}
            store = open_store(Path(folder), backend=BUFFERED, **options)
            for _, theirs, other in made:
                mine = theirs == fingerprint
                assert is_served(store, other) == mine
                assert mine or read_bytes(store, other.block_id)[0] is Outcome.MISSING
            assert block.block_id in store.block_ids()
            store.close()


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
