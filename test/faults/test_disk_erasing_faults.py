"""Erasing while disks fail or hang, while blocks are written, and killed between the steps."""

from __future__ import annotations

import errno
import signal
import threading
import time
from pathlib import Path

import pytest

from sglang_hc.store.disk import DiskStore
from sglang_hc.store.disk.erasing import Erased
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting
from support.clock import Clock
from support.disk_process import run_child
from support.disk_store import (
    EIO,
    FILE,
    Faults,
    FaultyBackend,
    block_files,
    check_ledgers,
    failing,
    make_path,
    names_of,
    nothing,
    only_in,
    open_store,
    put,
)
from support.erased import check_kept, traces
from support.waiting import HANGS_S, until

ACME, OTHER = Forgetting("acme"), "other tenant"


@pytest.fixture
def faults() -> Faults:
    return Faults()


def erase(store: DiskStore, what: Forgetting | None) -> Erased:
    if what is not None:
        return store.erase(what)
    store.forget_all()
    return store.erase_all()


# -- trouble --------------------------------------------------------------------------------------


USED = {None: ("on_unlink", "on_sync", "on_rename"), ACME: ("on_unlink", "on_sync", "on_open")}
"""The calls that a clear makes, and those that forgetting does."""


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("hook", ["on_unlink", "on_sync", "on_rename", "on_open"])
@pytest.mark.parametrize("what", [None, ACME])
def test_a_disk_that_fails_is_said_and_asked_again(
    scratch: Path, faults: Faults, hook: str, what: Forgetting | None, code: int
) -> None:
    store = open_store(scratch, backend=FaultyBackend(faults))
    mine = make_path(4, 1, "acme")
    put(store, mine)
    setattr(faults, hook, failing(code))
    erased = erase(store, what)
    fails = hook in USED[what] and (hook, code) != ("on_open", errno.EIO)  # unreadable goes too
    assert erased.complete is not fails
    assert (store.counters()["erasing_failed"] > 0) is fails
    setattr(faults, hook, nothing)
    if fails and what is None:
        assert store.contains(names_of(mine)) == 0
        outcome = Outcome.OK if hook == "on_unlink" else Outcome.DROPPED
        assert put(store, mine) == [outcome] * 4, "they would go with what is not cleared"
        store.tick()
        assert store.contains(names_of(mine)) == (4 if hook == "on_unlink" else 0)
        check_kept(store, [block for block in mine if store.contains([block.block_id])])
    assert erase(store, what).complete
    assert traces(scratch, mine, "acme") == []
    assert put(store, mine) == [Outcome.OK] * 4
    check_ledgers(store)
    store.close()


def test_what_cannot_be_read_goes_too(scratch: Path, faults: Faults) -> None:
    """Else one bad sector would keep every tenant's blocks for ever."""
    store = open_store(scratch, backend=FaultyBackend(faults))
    mine, others = make_path(4, 1, "acme"), make_path(4, 2, OTHER)
    put(store, mine + others)
    faults.on_read = only_in(others[0].block_id.hex(), EIO)
    assert store.erase(ACME) == Erased(5, True)
    faults.on_read = nothing
    check_kept(store, others[1:])
    assert store.contains(names_of(others)) == 0
    store.close()


@pytest.mark.parametrize("why", ["hangs", "fails"])
def test_a_clear_that_failed_is_made_up_for(scratch: Path, faults: Faults, why: str) -> None:
    """Until then nothing of it is found, and nothing is written that would go with it."""
    clock = Clock(1e9)
    folders = scratch / "a", scratch / "b"
    store = open_store(*folders, backend=FaultyBackend(faults), clock=clock)
    blocks = make_path(40)
    put(store, blocks)
    bad, good = store.directories
    held = len(good.blocks)
    if why == "hangs":
        bad.note_hang(True)
    else:
        faults.on_rename = only_in(f"{folders[0]}/", EIO)
    store.forget_all()
    assert store.erase_all() == Erased(held, False)
    bad.note_hang(False)
    faults.on_rename = nothing
    assert store.contains(names_of(blocks)) == 0 and not bad.find(names_of(blocks)[0])
    assert {*put(store, blocks)} == {Outcome.OK, Outcome.DROPPED}
    assert len(bad.blocks) == 0
    clock.now += 10
    store.tick()
    assert not any(path_of.exists() for path_of in map(Path, map(bad.path, names_of(blocks))))
    assert {*put(store, blocks)} == {Outcome.OK, Outcome.DUPLICATE}
    check_kept(store, blocks)
    check_ledgers(store)
    store.close()


def test_a_directory_that_hangs_is_not_asked(scratch: Path, faults: Faults) -> None:
    """Nobody would come back from it."""
    folders = scratch / "a", scratch / "b"
    store = open_store(*folders, backend=FaultyBackend(faults))
    mine = make_path(12, 1, "acme")
    put(store, mine)
    bad, good = store.directories
    asked: list[str] = []
    faults.on_open = faults.on_unlink = faults.on_stat = only_in(f"{folders[0]}/", asked.append)
    bad.note_hang(True)
    assert store.erase(ACME) == Erased(len(mine) - len(bad.blocks), False)
    assert asked == [] and len(good.blocks) == 0
    bad.note_hang(False)
    assert store.erase(ACME) == Erased(len(set(asked)), True)
    assert traces(folders[0], mine, "acme") == []
    store.close()


# -- writes under way -----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["on_create", "on_write", "on_note", "on_rename"])
def test_a_write_that_was_asked_for_before_a_clear_is_never_found(
    scratch: Path, faults: Faults, call: str
) -> None:
    store = open_store(scratch, backend=FaultyBackend(faults))
    other = open_store(scratch)
    mine = make_path(3, 1, "acme")
    inside, goes_on = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        if threading.current_thread() is writer:
            inside.set()
            assert goes_on.wait(HANGS_S)

    outcomes: list[Outcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(put(store, mine[:1])))
    setattr(faults, call, hold)
    writer.start()
    assert inside.wait(HANGS_S)
    store.forget_all()
    ended: list[Erased] = []
    eraser = threading.Thread(target=lambda: ended.append(store.erase_all()))
    eraser.start()
    eraser.join(0.05)
    assert not ended, "it waits for the write"
    assert put(store, mine[:2]) == [Outcome.DROPPED] * 2
    goes_on.set()
    writer.join()
    eraser.join()
    assert outcomes == [Outcome.DROPPED] and ended[0].complete
    assert store.contains(names_of(mine)) == 0
    other.tick()
    assert not other.find(mine[0].block_id)
    assert traces(scratch, mine, "acme") == []
    check_ledgers(store)
    store.close()
    other.close()


def test_clears_beside_threads_that_write_read_and_find(scratch: Path) -> None:
    """What was asked for before a clear is not found after its answer, by whomever."""
    stores = [open_store(scratch), open_store(scratch)]
    store, other = stores
    for one in stores:
        one.tick()
    paths = [make_path(6, seed) for seed in range(8)]
    stop, wrong = threading.Event(), []

    def write(number: int) -> None:
        while not stop.is_set():
            for path in paths[number::2]:
                wrong.extend({*put(store, path)} - {Outcome.OK, Outcome.DUPLICATE, Outcome.DROPPED})

    def find() -> None:
        while not stop.is_set():
            other.directories[0].find_others()
            store.directories[0].find_others()
            store.find(paths[0][0].block_id)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    threads.append(threading.Thread(target=find))
    for thread in threads:
        thread.start()
    for _ in range(25):
        until(lambda: len(store) > 4)
        store.forget_all()
        before = time.time_ns()
        assert store.erase_all().complete
        ages = map(created, Path(store.directories[0].folder.path).glob("?/?/*"))
        assert all(age is None or age * 1000 >= before - 1e6 for age in ages)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    store.forget_all()
    assert store.erase_all().complete and len(store) == 0
    check_ledgers(store)
    for one in stores:
        one.close()


def created(path: Path) -> int | None:
    """When a block was written, in us since 1970; None when it is gone."""
    try:
        return int.from_bytes(path.read_bytes()[64:72], "little")
    except FileNotFoundError:
        return None


# -- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["clear", "forget"])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 6])
def test_killed_between_the_steps_nothing_is_left_that_counts_for_ever(
    scratch: Path, what: str, step: int
) -> None:
    """A child erases, and is killed at its nth call to the disk. The next server finds a part of
    the blocks at most; once it erased too, nothing is left, in files or in the ledger."""
    mine, others = make_path(6, 1, "acme"), make_path(6, 2, OTHER)
    store = open_store(scratch, size=20 * FILE)
    put(store, mine + others)
    store.close()
    child = run_child("erase", str(scratch), what, str(step))
    assert child.wait(HANGS_S) == -signal.SIGKILL
    store = open_store(scratch, size=20 * FILE)
    check_ledgers(store)
    left = store.block_ids()
    check_kept(store, [block for block in mine + others if block.block_id in left])
    if what == "clear":
        assert len(left) == (0 if step else 12), "one rename, and nothing is found"
        store.tick()
        assert sum(1 for _ in block_files(scratch)) == len(left), "the rest is removed"
    else:
        assert store.contains(names_of(others)) == 6 and len(left) == 12 - step
    assert erase(store, None if what == "clear" else ACME).complete
    assert traces(scratch, mine, "acme") == []
    check_ledgers(store)
    store.close()


def test_killed_after_the_answer_nothing_is_found(scratch: Path) -> None:
    mine, others = make_path(100, 1, "acme"), make_path(100, 2, OTHER)
    store = open_store(scratch, size=400 * FILE)
    put(store, mine + others)
    store.close()
    child = run_child("erase", str(scratch), "forget", "none")
    assert child.stdout is not None and child.stdout.readline() == "100 True\n"
    child.kill()
    child.wait()
    assert traces(scratch, mine, "acme") == []
    store = open_store(scratch, size=400 * FILE)
    assert not set(names_of(mine)) & set(store.block_ids())
    check_kept(store, others)
    store.close()
