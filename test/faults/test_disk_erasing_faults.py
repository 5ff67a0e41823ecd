"""Erasing while disks fail or hang, while blocks are written, and killed between the steps."""

from __future__ import annotations

import errno
import signal
import threading
from pathlib import Path

import pytest

from sglang_hc.store.disk.erasing import Erased
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting
from support.disk_process import run_child
from support.disk_store import (
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


# -- trouble --------------------------------------------------------------------------------------


USED = {None: ("on_unlink", "on_sync"), ACME: ("on_unlink", "on_sync", "on_open")}
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
    erased = store.erase(what)
    fails = hook in USED[what] and (hook, code) != ("on_open", errno.EIO)  # unreadable goes too
    assert erased.complete is not fails
    assert (store.counters()["erasing_failed"] > 0) is fails
    setattr(faults, hook, nothing)
    assert store.erase(what).complete
    assert traces(scratch, mine, "acme") == []
    assert put(store, mine) == [Outcome.OK] * 4
    check_ledgers(store)


@pytest.mark.parametrize("what", [None, ACME])
def test_a_file_that_stays_keeps_no_other(
    scratch: Path, faults: Faults, what: Forgetting | None
) -> None:
    store = open_store(scratch, backend=FaultyBackend(faults))
    mine = make_path(6, 1, "acme")
    put(store, mine)
    for block in mine:  # whichever is the first one that is removed
        faults.on_unlink = only_in(block.block_id.hex(), failing(errno.EPERM))
        erased = store.erase(what)
        left = [path.name for path in block_files(scratch)]
        assert not erased.complete and left == [block.block_id.hex()]
        faults.on_unlink = nothing
        store.erase(what)
        put(store, mine)


@pytest.mark.parametrize("what", [None, ACME])
def test_a_directory_that_hangs_is_not_asked(
    scratch: Path, faults: Faults, what: Forgetting | None
) -> None:
    """Nobody would come back from it."""
    folders = scratch / "a", scratch / "b"
    store = open_store(*folders, backend=FaultyBackend(faults))
    mine = make_path(12, 1, "acme")
    put(store, mine)
    bad, good = store.directories
    asked: list[str] = []
    faults.on_open = faults.on_unlink = faults.on_stat = only_in(f"{folders[0]}/", asked.append)
    bad.note_hang(True)
    assert store.erase(what) == Erased(len(mine) - len(bad.blocks), False)
    assert asked == [] and len(good.blocks) == 0
    bad.note_hang(False)
    assert store.erase(what) == Erased(len(set(asked)), True)
    assert traces(folders[0], mine, "acme") == []


# -- others at work -------------------------------------------------------------------------------


def test_clears_beside_threads_that_write_read_and_find(scratch: Path) -> None:
    """Nobody is told of an error, and every file is counted once."""
    stores = [open_store(scratch), open_store(scratch)]
    store, other = stores
    for one in stores:
        one.tick()
    paths = [make_path(6, seed) for seed in range(8)]
    stop, wrong = threading.Event(), []

    def write(number: int) -> None:
        while not stop.is_set():
            for path in paths[number::2]:
                wrong.extend({*put(store, path)} - {Outcome.OK, Outcome.DUPLICATE})

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
        assert store.erase(None).complete
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.erase(None).complete and len(store) == 0
    check_ledgers(store)


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
    assert len(left) == 12 - step
    assert what == "clear" or store.contains(names_of(others)) == 6
    assert store.erase(None if what == "clear" else ACME).complete
    assert traces(scratch, mine, "acme") == []
    check_ledgers(store)
