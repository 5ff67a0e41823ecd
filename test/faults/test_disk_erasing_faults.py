"""Erasing while disks fail, indexes refuse, processes are killed and power is cut."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from sglang_hc.store.disk.index import Index
from sglang_hc.store.disk.index_file import IndexFull

from sglang_hc.store.disk import erasing
from sglang_hc.store.disk.directory import DAMAGED_NAME, INDEX_NAME
from sglang_hc.store.disk.erasing import Erased
from sglang_hc.tree.forgetting import Forgetting
from support.disk_store import (
    EIO,
    CrashBackend,
    Faults,
    FaultyBackend,
    copy_index,
    make_path,
    open_store,
    put,
    remove,
)
from support.erased import check_kept, lose_index, names, traces
from support.waiting import HANGS_S

ACME, OTHER = Forgetting("acme"), "other tenant"


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
