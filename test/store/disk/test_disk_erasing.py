"""What is erased is in no file, and no later start finds it again: whoever is killed, whatever is
lost."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.store.disk.erasing import Erased
from sglang_hc.store.disk.folders import ModelFolder, model_folders
from sglang_hc.store.disk.format import LABEL_MAX
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.cuts import cut_namespace
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.identity import BLOCK_BYTES, TOKEN_BYTES
from support.disk_store import (
    EIO,
    MEMORY,
    Faults,
    FaultyBackend,
    check_ledgers,
    flip,
    make_path,
    names_of,
    only_in,
    open_store,
    path_of_block,
    put,
    remove,
)
from support.erased import check_kept, traces

FOLDERS = "sglang_hc.store.disk.erasing.model_folders"
ACME, OTHER = Forgetting("acme"), "other tenant"


def test_a_namespace_is_gone_for_good_and_others_stay(scratch: Path) -> None:
    """Of every model in its directories."""
    folders = scratch / "a", scratch / "b"
    store, other = open_store(*folders), open_store(*folders, fingerprint=bytes(16))
    mine, others = make_path(12, 1, "acme"), make_path(12, 2, OTHER)
    put(store, mine)
    put(store, others)
    put(other, make_path(3, 1, "acme", bytes(16)))
    store.take_changes()
    assert store.erase(ACME) == Erased(15, True)
    other.directories[0].find_others()
    other.directories[1].find_others()
    assert other.block_ids() == []
    assert sorted(store.take_changes()) == sorted(names_of(mine)), "whoever mirrors it is told"
    assert store.contains(names_of(mine)) == 0
    assert not traces(folders[0], mine, "acme") and not traces(folders[1], mine, "acme")
    assert store.erase(ACME) == Erased(0, True), "there is nothing left"
    check_kept(store, others)
    check_ledgers(store)
    store.close()
    store = open_store(*folders)
    assert sorted(store.block_ids()) == sorted(names_of(others))


def test_everything_is_gone_for_good_but_other_models(scratch: Path) -> None:
    store, other = open_store(scratch), open_store(scratch, fingerprint=bytes(16))
    mine, theirs = make_path(12, 1, "acme"), make_path(5, 2, OTHER, bytes(16))
    put(store, mine)
    put(other, theirs)
    assert store.erase(None) == Erased(12, True)
    assert traces(scratch, mine, "acme") == [] and len(store) == 0
    assert store.erase(None) == Erased(0, True)
    check_kept(other, theirs)
    check_ledgers(store)
    assert put(store, mine) == [Outcome.OK] * 12, "it serves as ever"
    check_kept(store, mine)
    (folder,) = (store.directories[0].folder.path,)
    assert (Path(folder) / "label").read_text() == "tiny"


def test_who_erased_first_leaves_no_other_store_believing_that_the_blocks_are_there(
    scratch: Path,
) -> None:
    """A directory has a store for end parts as well, and each erases what is of the client."""
    blocks, ends = open_store(scratch), open_store(scratch, fingerprint=bytes(16))
    mine, others = make_path(6, 1, "acme"), make_path(5, 2, OTHER)
    put(blocks, mine)
    put(blocks, others)
    put(ends, make_path(2, 1, "acme", bytes(16)))
    blocks.take_changes()
    assert ends.erase(ACME) == Erased(8, True)
    assert blocks.erase(ACME) == Erased(0, True)
    assert blocks.contains(names_of(mine)[:1]) == 0
    assert sorted(blocks.take_changes()) == sorted(names_of(mine))
    check_kept(blocks, others)
    check_ledgers(blocks)


def test_cuts_adapters_and_weights_of_a_client_go_with_it(scratch: Path) -> None:
    cut, of_adapter = cut_namespace("k4:acme", 64, 64, bytes(128 * TOKEN_BYTES)), "a2:0f"
    gone = ["k4:acme", cut, "k4:acme" + of_adapter, cut + of_adapter]
    gone += [one + "w2:1e" for one in gone]
    other = cut_namespace("k5:acme2", 64, 64, bytes(128 * TOKEN_BYTES))
    stay = ["k5:acme2", "k3:acm", "s4:acme", "s2:ack2:me", other, "", of_adapter]
    store = open_store(scratch)
    for number, label in enumerate([*gone, *stay]):
        put(store, make_path(2, number, label))
    assert store.erase(Forgetting("k4:acme")) == Erased(2 * len(gone), True)
    left = [
        name for n in range(len(stay)) for name in names_of(make_path(2, len(gone) + n, stay[n]))
    ]
    assert sorted(store.block_ids()) == sorted(left)
    assert store.erase(Forgetting(None)) == Erased(4, True), "of those without a name"


def test_a_label_that_was_cut_off_may_be_the_one(scratch: Path) -> None:
    """A file knows the first 256 bytes of a label: what may be the client's goes."""
    long = "s" * LABEL_MAX
    store = open_store(scratch)
    for number, label in enumerate((long + "A", long + "B", long, "s" * 100)):
        put(store, make_path(2, number, label))
    assert store.erase(Forgetting(long + "A")).complete
    assert store.contains(names_of(make_path(2, 0, long + "A"))) == 0
    assert store.contains(names_of(make_path(2, 1, long + "B"))) == 0
    assert store.contains(names_of(make_path(2, 3, "s" * 100))) == 2


def test_a_prefix_goes_with_what_may_continue_it(scratch: Path) -> None:
    folders = scratch / "a", scratch / "b"
    store = open_store(*folders)
    path = make_path(4, 1, "k4:acme")
    behind = make_path(3, 11, "k4:acme", behind=path[-1])
    beside = make_path(3, 12, "k4:acme", behind=path[1])
    unlike, foreign = make_path(6, 2, "k4:acme"), make_path(4, 1, OTHER)
    cut = make_path(2, 3, cut_namespace("k4:acme", 64, 64, bytes(128 * TOKEN_BYTES)))
    for blocks in (path, behind, beside, unlike, foreign, cut):
        put(store, blocks)
    remove(store, names_of(behind[1:2] + unlike[3:4]))  # gaps, behind the end of the prefix
    tokens = b"".join(block.tokens for block in path)
    what = Forgetting("k4:acme", tokens[: 3 * BLOCK_BYTES + 8])
    assert store.erase(what) == Erased(4 + 2 + 2 + 2, True)
    left = names_of(beside + unlike[:3] + foreign)
    assert sorted(store.block_ids()) == sorted(left)
    assert not traces(folders[0], behind, cut[0].namespace)
    assert not traces(folders[1], behind, cut[0].namespace)


@pytest.mark.parametrize("damage", ["torn", "another block", "empty", "folder", "unreadable"])
def test_what_cannot_be_told_from_the_tenants_goes_too(scratch: Path, damage: str) -> None:
    """Else one bad sector would keep every tenant's blocks for ever."""
    faults = Faults()
    store = open_store(scratch, backend=FaultyBackend(faults))
    mine, others = make_path(4, 1, "acme"), make_path(4, 2, OTHER)
    put(store, mine + others)
    path = path_of_block(store, others[0])
    if damage == "torn":
        flip(path, 100)
    elif damage == "another block":
        path.write_bytes(path_of_block(store, others[1]).read_bytes())
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "unreadable":
        faults.on_read = only_in(path.name, EIO)
    else:
        path.unlink()
        path.mkdir()
    assert store.erase(ACME) == Erased(5, True)
    assert not path.exists()
    check_kept(store, others[1:])
    assert store.contains(names_of(others)) == 0


def test_a_block_that_others_store_again_while_names_are_read_stays(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(scratch), open_store(scratch)
    theirs = make_path(3, 2, OTHER)
    put(store, theirs)
    remove(other, names_of(theirs))

    def stored_again(root: str) -> list[ModelFolder]:
        folders = model_folders(root)
        monkeypatch.setattr(FOLDERS, model_folders)

        def names(self: ModelFolder) -> list[bytes]:
            monkeypatch.undo()
            before = [*self.block_ids()]
            put(other, theirs)
            return before

        monkeypatch.setattr(ModelFolder, "block_ids", names)
        return folders

    monkeypatch.setattr(FOLDERS, stored_again)
    assert store.erase(ACME) == Erased(0, True)
    check_kept(other, theirs)
    check_kept(store, theirs)


# -- any order of operations ----------------------------------------------------------------------

LABELS = ("acme", "acme2", OTHER, "")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("remove"), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("forget"), st.integers(0, 3), st.just(0)),
        st.tuples(st.sampled_from(["clear", "restart"]), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(steps)
def test_forgetting_is_final_in_any_order_of_operations(
    history: list[tuple[str, int, int]],
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        store = open_store(Path(name))
        there: dict[bytes, str] = {}
        for action, which, seed in history:
            path = make_path(2, seed, LABELS[which])
            if action == "put":
                put(store, path)
                there |= dict.fromkeys(names_of(path), LABELS[which])
            elif action == "remove":
                remove(store, names_of(path))
                there = {name: label for name, label in there.items() if name not in names_of(path)}
            elif action == "forget":
                assert store.erase(Forgetting(LABELS[which] or None)).complete
                there = {name: label for name, label in there.items() if label != LABELS[which]}
            elif action == "clear":
                assert store.erase(None) == Erased(len(there), True)
                there = {}
            else:
                store.close()
                store = open_store(Path(name))
            assert set(store.block_ids()) == set(there)
            check_ledgers(store)
        store.close()
