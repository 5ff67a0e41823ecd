"""State of another model, plan, dtype, namespace, salt or LoRA is never served from disk."""

from __future__ import annotations

import tempfile
from itertools import combinations
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.block import Block
from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import block_id, pack_tokens, root_id
from support.disk_store import (
    MEMORY,
    data_of,
    empty_slot,
    make_path,
    open_store,
    path_of_block,
    put,
    read_block,
    read_bytes,
)

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
            store = open_store(Path(folder), backend=DirectBackend(direct=False), **options)
            data = data_of(block, layout.slot_bytes)
            assert store.write(block, memoryview(data)) is Outcome.OK
            store.close()
        for layout, fingerprint, block in made:
            options = {"layout": layout, "fingerprint": fingerprint}
            store = open_store(Path(folder), backend=DirectBackend(direct=False), **options)
            for _, theirs, other in made:
                into = empty_slot(layout.slot_bytes)
                status = read_block(store, other.block_id, into)
                mine = theirs == fingerprint
                assert status is (Outcome.OK if mine else Outcome.MISSING)
                assert not mine or np.array_equal(into, data_of(other, layout.slot_bytes))
            assert block.block_id in store.block_ids()
            store.close()


def test_a_ranks_part_of_a_block_is_not_served_to_another_rank(tmp_path: Path) -> None:
    """Neither by its name, nor where somebody put the file."""
    (block,) = make_path(1)
    first, second = (open_store(tmp_path, part=part * 16) for part in (b"1", b"2"))
    put(first, [block])
    assert first.contains([block.block_id]) == 1
    assert second.contains([block.block_id]) == 0 and not second.find(block.block_id)
    theirs = path_of_block(first, block)
    second.directories[0].backend.rename(str(theirs), second.directories[0].path(block.block_id))
    assert second.directories[0].find(block.block_id)
    assert read_bytes(second, block.block_id)[0] is Outcome.DAMAGED
    first.close()
    second.close()
