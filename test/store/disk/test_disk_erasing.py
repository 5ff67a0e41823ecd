"""What is erased is in no file, and no later start finds it again: whoever is killed, whatever is
lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.disk import DiskStore, erasing
from sglang_hc.store.disk.directory import DAMAGED_NAME, INDEX_NAME
from sglang_hc.store.disk.erasing import Erased
from sglang_hc.store.disk.format import LABEL_MAX
from sglang_hc.store.disk.index import Index
from sglang_hc.store.disk.index_file import IndexFull, Row
from sglang_hc.store.disk.writer import Block
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.cuts import cut_namespace
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.identity import BLOCK_BYTES, TOKEN_BYTES, block_id, pack_tokens, root_id
from support.disk_store import (
    EIO,
    FINGERPRINT,
    MEMORY,
    CrashBackend,
    Faults,
    FaultyBackend,
    copy_index,
    data_of,
    make_path,
    open_store,
    put,
    read_bytes,
    remove,
)
from support.waiting import HANGS_S

ACME, OTHER = Forgetting("acme"), "other tenant"


def names(blocks: list[Block]) -> list[bytes]:
    return [block.block_id for block in blocks]


def lose_index(folder: Path) -> None:
    for name in os.listdir(folder / "sglang-hc"):
        if name.startswith("index"):
            (folder / "sglang-hc" / name).unlink()


def traces(folder: Path, blocks: list[Block], label: str) -> list[str]:
    """Where token ids of these blocks, or the label, lie in the files of a directory."""
    needles = [block.tokens[:32] for block in blocks] + [label.encode()]
    found = []
    for path in (folder / "sglang-hc").iterdir():
        content = path.read_bytes()
        found += [f"{path.name}: {needle!r}" for needle in needles if needle in content]
    return found


def check_kept(store: DiskStore, blocks: list[Block]) -> None:
    for block in blocks:
        outcome, got = read_bytes(store, block.block_id)
        assert outcome is Outcome.OK and np.array_equal(got, data_of(block))


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
    cut = cut_namespace("acme", 64, 64, bytes(128 * TOKEN_BYTES))
    gone = ["acme", cut, "acme" + "0f" * 16, cut + "0f" * 16]
    stay = ["acme2", "acm", "", "acme" + "0f" * 15, "0f" * 16 + "acme", cut_namespace(
        "acme2", 64, 64, bytes(128 * TOKEN_BYTES)
    )]  # fmt: skip
    store = open_store(tmp_path)
    for number, label in enumerate([*gone, *stay]):
        put(store, make_path(2, number, label))
    assert store.erase(ACME) == Erased(2 * len(gone), True)
    left = [name for n in range(len(stay)) for name in names(make_path(2, len(gone) + n, stay[n]))]
    assert sorted(store.block_ids()) == sorted(left)
    assert store.erase(Forgetting(None)) == Erased(2, True), "no salt, and no other tenant's"
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
    path = make_path(4, 1, "acme")
    behind, beside = continue_path(path, 3, 1), continue_path(path[:2], 3, 2)
    unlike, foreign = make_path(6, 2, "acme"), make_path(4, 1, OTHER)
    cut = make_path(2, 3, cut_namespace("acme", 64, 64, bytes(128 * TOKEN_BYTES)))
    for blocks in (path, behind, beside, unlike, foreign, cut):
        put(store, blocks)
    remove(store, names(behind[1:2] + unlike[3:4]))  # gaps, behind the end of the prefix
    tokens = b"".join(block.tokens for block in path)
    what = Forgetting("acme", tokens[: 3 * BLOCK_BYTES + 8])
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


# -- trouble --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_write", "on_sync", "on_read"])
@pytest.mark.parametrize("what", [None, ACME])
def test_a_disk_that_fails_is_said(tmp_path: Path, hook: str, what: Forgetting | None) -> None:
    faults = Faults()
    store = open_store(tmp_path, backend=FaultyBackend(faults))
    put(store, make_path(4, 2, OTHER))
    put(store, make_path(4, 1, "acme"))
    remove(store, names(make_path(4, 2, OTHER)[:1]))
    if what is None:  # one that is not this model's keeps the slab, so that slots are overwritten
        store.directories[0].slabs.allocate(store.model.slot_bytes)
    setattr(faults, hook, EIO)
    in_use = erasing.IN_USE_S
    erasing.IN_USE_S = 0.0
    try:
        assert not store.erase(what).complete
    finally:
        erasing.IN_USE_S = in_use
    assert store.counters()["erasing_failed"] >= 1
    setattr(faults, hook, lambda path: None)
    if what is not None:
        assert store.erase(what).complete
        assert traces(tmp_path, make_path(4, 1, "acme"), "acme") == []
    store.close()


def test_an_index_that_refuses_and_a_damaged_one_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    put(store, make_path(4, 1, "acme"))

    def full(*_: object) -> None:
        raise IndexFull("held")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "delete", full)
        assert store.erase(ACME) == Erased(0, False)
    assert store.erase(ACME) == Erased(4, True), "the rows were still there"
    store.directories[0].fail("for the test")
    assert store.erase(ACME) == Erased(0, False)
    assert store.erase(None) == Erased(0, False)
    store.close()


def test_a_reader_of_the_log_is_said(tmp_path: Path) -> None:
    """Else the label would stay in the log."""
    store = open_store(tmp_path)
    put(store, make_path(4, 1, "acme"))
    reader = sqlite3.connect(tmp_path / "sglang-hc" / INDEX_NAME, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM blocks").fetchall()
    assert store.erase(ACME) == Erased(4, False)
    reader.close()
    assert store.erase(ACME) == Erased(0, True)
    assert traces(tmp_path, make_path(4, 1, "acme"), "acme") == []
    store.close()


def test_a_directory_that_was_left_out_at_the_start_is_said(tmp_path: Path) -> None:
    class Lost(FaultyBackend):
        def open(self, path: str, create: bool = False):
            if "/b/" in path:
                EIO(path)
            return super().open(path, create)

    for folder in ("a", "b"):
        store = open_store(tmp_path / folder)
        put(store, make_path(2, 1, "acme"))
        store.close()
    store = open_store(tmp_path / "a", tmp_path / "b", backend=Lost(Faults()))
    assert len(store.directories) == 1
    assert store.erase(ACME) == Erased(2, False)
    store.close()


def test_a_slot_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    """Its write may fail, and leave what was in it before."""
    faults = Faults()
    store = open_store(tmp_path, backend=FaultyBackend(faults))
    mine, others = make_path(6, 1, "acme"), make_path(6, 2, OTHER)
    put(store, mine)
    remove(store, names(mine))
    began, goes_on = threading.Event(), threading.Event()

    def fail(path: str) -> None:
        if threading.current_thread() is writer:
            began.set()
            assert goes_on.wait(HANGS_S)
            EIO(path)

    writer = threading.Thread(target=put, args=(store, others))
    faults.on_write = fail
    writer.start()
    assert began.wait(HANGS_S)
    ended: list[Erased] = []
    eraser = threading.Thread(target=lambda: ended.append(store.erase(ACME)))
    eraser.start()
    eraser.join(0.2)
    assert eraser.is_alive()
    goes_on.set()
    writer.join()
    eraser.join()
    assert ended == [Erased(0, True)]
    assert traces(tmp_path, mine, "acme") == []
    store.close()


# -- kills and power cuts -------------------------------------------------------------------------


def in_a_child(body: Callable[[int], None]) -> None:
    """Run it in a process that is killed at a random moment after it said that it is done."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            body(writer)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read(4) == b"done"
        threading.Event().wait(random.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("prune", ["the index", "its log", "nothing"])
def test_killed_after_the_answer_nothing_of_200_blocks_is_found(
    tmp_path: Path, seed: int, prune: str
) -> None:
    size = 40_000_000
    mine, others = make_path(200, 100 + seed, "acme"), make_path(200, 200 + seed, OTHER)

    def erase(answer: int) -> None:
        store = open_store(tmp_path, size=size, background=True)
        for low in range(0, 200, 20):
            put(store, mine[low : low + 20])
            put(store, others[low : low + 20])
        going_on = threading.Thread(
            target=put, args=(store, make_path(400, 300 + seed, "third")), daemon=True
        )
        going_on.start()
        assert store.erase(ACME) == Erased(200, True)
        os.write(answer, b"done")

    in_a_child(erase)
    if prune == "the index":
        lose_index(tmp_path)
    elif prune == "its log":
        (tmp_path / "sglang-hc" / "index.sqlite-wal").unlink()
        (tmp_path / "sglang-hc" / DAMAGED_NAME).touch()
    assert traces(tmp_path, mine, "acme") == []
    store = open_store(tmp_path, size=size)
    assert traces(tmp_path, mine, "acme") == []
    assert not set(names(mine)) & set(store.block_ids())
    assert store.contains(names(others)) == 200
    check_kept(store, others)
    store.close()


@pytest.mark.parametrize("seed", range(12))
def test_after_a_power_cut_nothing_is_found(tmp_path: Path, seed: int) -> None:
    """What was not synced is kept, lost or torn."""
    rng = random.Random(seed)
    backend = CrashBackend(lambda kind: None)
    folder, left = tmp_path / "live", tmp_path / "left"
    store = open_store(folder, backend=backend)
    mine, others = make_path(8, 1, "acme"), make_path(8, 2, OTHER)
    for a, b in pairwise((0, 4, 8)):
        put(store, mine[a:b])
        put(store, others[a:b])
    remove(store, names(mine[:2]))
    what = ACME if seed % 3 else None
    assert store.erase(what).complete
    (left / "sglang-hc").mkdir(parents=True)
    backend.leave(lambda path: str(left / "sglang-hc" / os.path.basename(path)), rng)
    if seed % 2:
        root = folder / "sglang-hc"
        copy_index(root / INDEX_NAME, left / "sglang-hc" / INDEX_NAME, None)
    store.close()
    assert traces(left, mine, "acme") == []
    store = open_store(left)
    assert not set(names(mine)) & set(store.block_ids())
    if what is not None:
        check_kept(store, others)
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


def test_root_of_a_namespace_is_not_its_label() -> None:
    """Two labels that are alike are two namespaces: what hides whose a block is, is forgotten."""
    assert root_id(FINGERPRINT, None) != root_id(FINGERPRINT, "")
    assert Forgetting("").names(None) and Forgetting(None).names("")
