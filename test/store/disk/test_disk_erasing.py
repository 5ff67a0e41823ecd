"""What is erased is in no file, and no later start finds it again: whoever is killed, whatever is
lost."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_hc.store.disk.index_file import Row

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.disk.erasing import Erased
from sglang_hc.store.disk.format import LABEL_MAX
from sglang_hc.store.disk.writer import Block
from sglang_hc.tree.cuts import cut_namespace
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.identity import BLOCK_BYTES, TOKEN_BYTES, block_id, pack_tokens
from support.disk_store import (
    FINGERPRINT,
    MEMORY,
    make_path,
    open_store,
    put,
    remove,
)
from support.erased import check_kept, lose_index, names, traces

ACME, OTHER = Forgetting("acme"), "other tenant"


def continue_path(path: list[Block], count: int, seed: int) -> list[Block]:
    """Blocks behind others, with other tokens for each seed."""
    rng, last, found = random.Random(seed), path[-1], []
    for position in range(last.position + 1, last.position + 1 + count):
        tokens = pack_tokens(rng.choices(range(32000), k=BLOCK_TOKENS))
        last = Block(
            block_id(FINGERPRINT, last.block_id, tokens),
            last.block_id,
            last.namespace,
            position,
            tokens,
        )
        found.append(last)
    return found


def test_a_namespace_is_gone_for_good_and_others_stay(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    store = open_store(*folders)
    mine, others = make_path(12, 1, "acme"), make_path(12, 2, OTHER)
    put(store, mine)
    put(store, others)
    store.drain_removed()
    assert store.erase(ACME) == Erased(12, True)
    assert sorted(store.drain_removed()) == sorted(names(mine)), "whoever mirrors it is told"
    assert store.contains(names(mine)) == 0
    assert store.erase(ACME) == Erased(0, True), "there is nothing left"
    check_kept(store, others)
    store.check_integrity()
    store.close()
    for folder in folders:
        assert traces(folder, mine, "acme") == []
        lose_index(folder)
    store = open_store(*folders)
    assert sorted(store.block_ids()) == sorted(names(others))
    check_kept(store, others)
    put(store, mine)
    check_kept(store, mine)
    store.close()


def test_what_left_its_slot_before_is_erased_as_well(tmp_path: Path) -> None:
    """Evicted, written a second time, found damaged: a rebuilt index would find each of them."""
    store = open_store(tmp_path)
    mine, others = make_path(9, 1, "acme"), make_path(4, 2, OTHER)
    put(store, mine)
    put(store, others)
    remove(store, names(mine[:3]))
    directory = store.directories[0]
    for block in mine[3:6]:
        place = directory.acquire(block.block_id)
        assert place is not None
        assert directory.drop_damaged(Row(directory.number, block.block_id, *place))
        directory.slabs.unlease([place])
    assert traces(tmp_path, mine[:6], OTHER)
    assert store.erase(ACME) == Erased(3, True)
    assert traces(tmp_path, mine, "acme") == []
    store.check_integrity()
    assert len(directory.slabs.quarantined) == 3
    store.close()
    lose_index(tmp_path)
    store = open_store(tmp_path)
    assert sorted(store.block_ids()) == sorted(names(others))
    store.close()


def test_cuts_and_adapters_of_a_client_go_with_it(tmp_path: Path) -> None:
    cut, of_adapter = cut_namespace("k4:acme", 64, 64, bytes(128 * TOKEN_BYTES)), "a2:0f"
    gone = ["k4:acme", cut, "k4:acme" + of_adapter, cut + of_adapter]
    other = cut_namespace("k5:acme2", 64, 64, bytes(128 * TOKEN_BYTES))
    stay = ["k5:acme2", "k3:acm", "s4:acme", "s2:ack2:me", other, "", of_adapter]
    store = open_store(tmp_path)
    for number, label in enumerate([*gone, *stay]):
        put(store, make_path(2, number, label))
    assert store.erase(Forgetting("k4:acme")) == Erased(2 * len(gone), True)
    left = [name for n in range(len(stay)) for name in names(make_path(2, len(gone) + n, stay[n]))]
    assert sorted(store.block_ids()) == sorted(left)
    assert store.erase(Forgetting(None)) == Erased(4, True), "of those without a name"
    store.close()


def test_a_label_that_was_cut_off_does_not_hide_a_block(tmp_path: Path) -> None:
    """In the index after 64 bytes, in the slot after 256: with the one the other tells, with the
    other whatever may be the client's goes."""
    index, slot = "i" * 70, "s" * LABEL_MAX
    store = open_store(tmp_path)
    for number, label in enumerate((index + "A", index + "B", slot + "A", slot + "B", "s" * 100)):
        put(store, make_path(2, number, label))
    assert store.erase(Forgetting(index + "A")) == Erased(2, True)
    assert store.contains(names(make_path(2, 1, index + "B"))) == 2
    assert store.erase(Forgetting(slot + "A")) == Erased(4, True)
    assert store.contains(names(make_path(2, 4, "s" * 100))) == 2
    store.close()


def test_a_prefix_goes_with_what_may_continue_it(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    store = open_store(*folders)
    path = make_path(4, 1, "k4:acme")
    behind, beside = continue_path(path, 3, 1), continue_path(path[:2], 3, 2)
    unlike, foreign = make_path(6, 2, "k4:acme"), make_path(4, 1, OTHER)
    cut = make_path(2, 3, cut_namespace("k4:acme", 64, 64, bytes(128 * TOKEN_BYTES)))
    for blocks in (path, behind, beside, unlike, foreign, cut):
        put(store, blocks)
    remove(store, names(behind[1:2] + unlike[3:4]))  # gaps, behind the end of the prefix
    tokens = b"".join(block.tokens for block in path)
    what = Forgetting("k4:acme", tokens[: 3 * BLOCK_BYTES + 8])
    assert store.erase(what) == Erased(4 + 2 + 2 + 2, True)
    left = names(beside + unlike[:3] + foreign)
    assert sorted(store.block_ids()) == sorted(left)
    assert not traces(folders[0], behind, cut[0].namespace)
    assert not traces(folders[1], behind, cut[0].namespace)
    store.close()


def test_of_every_model_in_the_directory(tmp_path: Path) -> None:
    other = bytes(16)
    store = open_store(tmp_path, fingerprint=other)
    put(store, make_path(3, 1, "acme", other))
    store.close()
    store = open_store(tmp_path)
    put(store, make_path(3, 1, "acme"))
    assert store.erase(ACME) == Erased(6, True)
    store.close()
    store = open_store(tmp_path, fingerprint=other)
    assert store.block_ids() == []
    store.close()


@pytest.mark.parametrize("what", [None, ACME])
def test_cleared_is_cleared_whatever_becomes_of_the_index(
    tmp_path: Path, what: Forgetting | None
) -> None:
    store = open_store(tmp_path)
    blocks = make_path(20, 1, "acme")
    put(store, blocks)
    assert store.erase(what) == Erased(20, True)
    store.check_integrity()
    assert traces(tmp_path, blocks, "acme") == []
    put(store, make_path(5, 2, OTHER))
    store.close()
    lose_index(tmp_path)
    store = open_store(tmp_path)
    assert sorted(store.block_ids()) == sorted(names(make_path(5, 2, OTHER)))
    store.close()


def test_a_clear_leaves_the_blocks_of_other_models_in_shared_slabs(tmp_path: Path) -> None:
    other = bytes(16)
    store = open_store(tmp_path, fingerprint=other)
    theirs = make_path(3, 1, "acme", other)
    put(store, theirs)
    store.close()
    store = open_store(tmp_path)
    mine = make_path(3, 1, "acme")
    put(store, mine)
    assert store.erase(None) == Erased(3, True)
    assert traces(tmp_path, make_path(3, 9), "(none)") == []
    store.close()
    lose_index(tmp_path)
    store = open_store(tmp_path, fingerprint=other)
    assert sorted(store.block_ids()) == sorted(names(theirs))
    store.close()


def test_what_is_too_old_is_not_found_again_by_a_rebuilt_index(tmp_path: Path) -> None:
    now = 1e9
    store = open_store(tmp_path, clock=lambda: now, ttl_s=100.0)
    put(store, make_path(5))
    now += 101
    store.tick()
    assert store.block_ids() == []
    store.close()
    lose_index(tmp_path)
    store = open_store(tmp_path, clock=lambda: now, ttl_s=100.0)
    assert store.block_ids() == []
    store.close()


# -- any order of operations ----------------------------------------------------------------------

LABELS = ("acme", "acme2", OTHER, "")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("remove"), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("forget"), st.integers(0, 3), st.just(0)),
        st.tuples(st.sampled_from(["clear", "restart", "rebuild"]), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(steps, st.integers(0, 10**9))
def test_forgetting_is_final_in_any_order_of_operations(
    history: list[tuple[str, int, int]], number: int
) -> None:
    folder = Path(MEMORY or "/tmp") / f"erasing-{os.getpid()}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    store = open_store(folder)
    may_be: set[bytes] = set()
    """What was written and not erased since: a rebuilt index may find it."""
    must_be: set[bytes] = set()
    labels: dict[bytes, str] = {}
    try:
        for action, which, seed in history:
            path = make_path(2, seed, LABELS[which])
            if action == "put":
                put(store, path)
                labels |= {block.block_id: LABELS[which] for block in path}
                may_be |= set(names(path))
                must_be |= set(names(path))
            elif action == "remove":
                remove(store, names(path))
                must_be -= set(names(path))
            elif action == "forget":
                what = Forgetting(LABELS[which] or None)
                assert store.erase(what).complete
                gone = {name for name in may_be if labels[name] == LABELS[which]}
                may_be, must_be = may_be - gone, must_be - gone
            elif action == "clear":
                assert store.erase(None).complete
                may_be, must_be = set(), set()
            else:
                store.close()
                if action == "rebuild":
                    lose_index(folder)
                store = open_store(folder)
            found = set(store.block_ids())
            assert must_be <= found <= may_be
            store.check_integrity()
    finally:
        store.close()
        shutil.rmtree(folder)
