"""Full disks, I/O errors at every call and short reads."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hc.store.circuit_breaker import FAILURES_TO_OPEN
from sglang_hc.store.disk import DiskStore
from sglang_hc.store.outcome import Outcome
from support.clock import Clock
from support.disk_store import (
    EIO,
    ENOSPC,
    FILE,
    HOOKS,
    Faults,
    FaultyBackend,
    check_ledgers,
    empty_slot,
    failing,
    file_bytes,
    is_served,
    make_path,
    nothing,
    only_in,
    open_store,
    put,
    read_block,
    read_bytes,
    remove,
)

ERRORS = (Outcome.IO_ERROR, Outcome.NO_SPACE)


@pytest.fixture
def store(scratch: Path, faults: Faults) -> DiskStore:
    return open_store(scratch, size=40 * FILE, backend=FaultyBackend(faults))


def set_all(faults: Faults, hook: Callable[[str], None]) -> None:
    for name in HOOKS:
        setattr(faults, f"on_{name}", hook)


def nth(count: int, hook: Callable[[str], None]) -> tuple[Callable[[str], None], list[str]]:
    """The hook at its nth call alone, counted from 0; and the calls."""
    calls: list[str] = []

    def at(path: str) -> None:
        calls.append(path)
        if len(calls) == count + 1:
            hook(path)

    return at, calls


@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.EROFS])
def test_an_error_at_any_call_of_anything(store: DiskStore, faults: Faults, code: int) -> None:
    """Of a write that evicts, reads, a removal and upkeep, each call fails once. Nothing is raised
    but by what says so, no wrong byte is served, and the ledger stays right."""
    open_store(Path(store.directories[0].root).parent, size=40 * FILE)
    clock = Clock(time.time())
    store.directories[0].clock = clock
    for seed in range(100, 105):
        put(store, make_path(8, seed=seed))
    for step in range(1000):
        clock.now += 60
        hook, calls = nth(step, failing(code))
        set_all(faults, hook)
        blocks = make_path(12, seed=step)
        wrote = put(store, blocks)
        for block in blocks:
            is_served(store, block)
        store.tick()
        read_block(store, blocks[3].block_id, empty_slot())
        try:
            remove(store, [blocks[5].block_id])
        except OSError as error:
            assert error.errno == code
        set_all(faults, nothing)
        assert wrote.count(Outcome.OK) >= 11 and set(wrote) <= {Outcome.OK, *ERRORS}
        assert file_bytes(Path(store.directories[0].root).parent) <= 40 * FILE
        check_ledgers(store)
        assert store.in_use(), "one failure is no reason for a pause"
        if len(calls) <= step:
            break
    else:
        raise AssertionError("there were always more calls")
    assert step > 100


def test_an_unreadable_block_is_a_miss_once(store: DiskStore, faults: Faults) -> None:
    """A block that could not be read was offered again and again in another store."""
    blocks = make_path(3)
    put(store, blocks)
    faults.on_read = EIO
    assert read_bytes(store, blocks[1].block_id)[0] is Outcome.IO_ERROR
    faults.on_read = nothing
    assert store.contains([block.block_id for block in blocks]) == 1
    assert read_bytes(store, blocks[1].block_id)[0] is Outcome.MISSING
    assert put(store, [blocks[1]]) == [Outcome.OK]
    assert is_served(store, blocks[1])


def test_a_damaged_block_that_cannot_be_removed_is_not_offered(
    store: DiskStore, faults: Faults
) -> None:
    (block,) = make_path(1)
    put(store, [block])
    faults.on_unlink = failing(errno.EROFS)
    faults.short = 512
    assert read_bytes(store, block.block_id)[0] is Outcome.DAMAGED
    faults.short = 0
    assert read_bytes(store, block.block_id)[0] is Outcome.MISSING
    check_ledgers(store)
    faults.on_unlink = nothing
    assert put(store, [block]) == [Outcome.OK] and is_served(store, block)
    check_ledgers(store)


@pytest.mark.parametrize("hook", ["on_create", "on_write", "on_note", "on_rename"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_is_not_visible(
    store: DiskStore, faults: Faults, scratch: Path, hook: str, code: int
) -> None:
    """A failed store that stayed visible gave gibberish later in another store."""
    blocks = make_path(4)
    put(store, blocks[:1])
    setattr(faults, hook, failing(code))
    expected = Outcome.IO_ERROR if code == errno.EIO else Outcome.NO_SPACE
    assert put(store, blocks[1:]) == [expected] * 3
    setattr(faults, hook, nothing)
    assert store.contains([block.block_id for block in blocks]) <= 1
    assert not list((scratch / "sglang-hc" / "new").iterdir()), "and leaves nothing"
    check_ledgers(store)
    store.tick()
    assert set(put(store, blocks)) <= {Outcome.OK, Outcome.DUPLICATE}
    assert all(is_served(store, block) for block in blocks)


def test_what_a_failed_write_cannot_remove_counts_until_the_server_ends(
    store: DiskStore, faults: Faults, scratch: Path
) -> None:
    (block,) = make_path(1)
    faults.on_write = faults.on_unlink = EIO
    assert put(store, [block]) == [Outcome.IO_ERROR]
    faults.on_write = faults.on_unlink = nothing
    assert len(list((scratch / "sglang-hc" / "new").iterdir())) == 1
    with store.directories[0].ledger.held():
        assert store.directories[0].ledger.used == FILE
    assert put(store, [block]) == [Outcome.OK] and is_served(store, block)
    store.close()
    store = open_store(scratch)
    assert not list((scratch / "sglang-hc" / "new").iterdir())
    check_ledgers(store)


def test_one_of_two_directories_destroyed_while_running(
    scratch: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks are lost, the other one's are served, writes go on, and it is said once."""
    clock = Clock(1e9)
    store = open_store(scratch / "a", scratch / "b", backend=FaultyBackend(faults), clock=clock)
    put(store, make_path(6 * FAILURES_TO_OPEN))
    good, bad = ([*directory.blocks] for directory in store.directories)
    assert len(bad) > FAILURES_TO_OPEN + 1
    set_all(faults, only_in(f"{scratch}/b/", EIO))
    for _ in range(2):
        assert all(is_served(store, name) for name in good)
        assert not any(is_served(store, name) for name in bad)
    fresh = make_path(12, seed=9)
    assert put(store, fresh) == [Outcome.OK] * 12, "all to the one that is left"
    assert store.counters()["directory_pauses"] == 1
    assert sum("keeps failing" in record.getMessage() for record in caplog.records) == 1
    assert len(store.in_use()) == 1
    changed = store.take_changes()
    store.tick()
    set_all(faults, nothing)
    clock.now += 6
    left = [name for name in bad if store.contains([name])]
    assert left, "what it was not asked for while it failed is there again"
    assert set(left) <= set(store.take_changes()) and set(left) <= {*changed, *bad}
    assert all(is_served(store, name) for name in left)
    assert len(store.in_use()) == 2


def test_a_disk_that_keeps_failing_is_left_alone_for_a_while(scratch: Path, faults: Faults) -> None:
    clock = Clock(1e9)
    store = open_store(scratch, backend=FaultyBackend(faults), clock=clock)
    blocks = make_path(FAILURES_TO_OPEN + 4)
    put(store, blocks)
    asked = []

    def count(path: str) -> None:
        asked.append(path)
        EIO(path)

    faults.on_read = count
    for block in blocks:
        assert read_bytes(store, block.block_id)[0] is Outcome.IO_ERROR
    assert len(asked) == FAILURES_TO_OPEN, "not asked any more"
    last = [blocks[-1].block_id]
    assert store.contains(last) == 0 and put(store, make_path(1, seed=5)) == [Outcome.IO_ERROR]
    assert store.counters()["directory_pauses"] == 1
    clock.now += 6
    assert store.contains(last) == 1, "asked again after the pause"
    assert read_bytes(store, blocks[-2].block_id)[0] is Outcome.IO_ERROR
    assert store.contains(last) == 0, "one failure is enough for the next, longer pause"
    clock.now += 6
    assert store.contains(last) == 0
    clock.now += 6
    faults.on_read = nothing
    assert is_served(store, blocks[-1])
    assert store.in_use()


# -- little room ----------------------------------------------------------------------------------


class SmallDisk(FaultyBackend):
    """A file system with room for so many files of blocks, `others` of which somebody else has."""

    def __init__(self, folder: Path, files: int) -> None:
        super().__init__(Faults())
        self._folder, self.files, self.others = folder, files, 0
        self.faults.on_write = self._check

    def free_bytes(self, path: str) -> int:
        return max(0, (self.files - self.others) * FILE - file_bytes(self._folder))

    def _check(self, path: str) -> None:
        if os.path.getsize(path) < FILE and self.free_bytes(path) < FILE:  # else it is written over
            ENOSPC(path)


def warnings(caplog: pytest.LogCaptureFixture, what: str) -> int:
    return sum(what in record.getMessage() for record in caplog.records)


def test_a_budget_that_is_larger_than_the_disk_is_said_once(
    scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (scratch / "sglang-hc" / "new").mkdir(parents=True)
    store = open_store(scratch, size=80 * FILE, backend=SmallDisk(scratch, 40))
    assert warnings(caplog, "the disk has room for 0.0 of the 0.0 GB of the budget") == 1
    for seed in range(12):
        assert put(store, make_path(8, seed=seed)) == [Outcome.OK] * 8
    assert file_bytes(scratch) == 40 * FILE and store.contains([make_path(1, seed=11)[0].block_id])
    assert warnings(caplog, "disk") == 1
    check_ledgers(store)


def test_others_fill_the_disk(scratch: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Older blocks go, one warning says so, no read fails, and room that is back is used."""
    (scratch / "sglang-hc" / "new").mkdir(parents=True)
    clock, disk = Clock(1e9), SmallDisk(scratch, 50)
    store = open_store(scratch, size=40 * FILE, backend=disk, clock=clock)
    assert warnings(caplog, "disk") == 0
    for seed in range(5):
        assert put(store, make_path(8, seed=seed)) == [Outcome.OK] * 8
    remove(store, store.block_ids()[:10])
    disk.others = 20
    outcomes = [one for seed in range(5, 9) for one in put(store, make_path(8, seed=seed))]
    assert outcomes[0] is Outcome.NO_SPACE and set(outcomes[1:]) == {Outcome.OK}
    assert warnings(caplog, "the disk is full") == 1
    assert file_bytes(scratch) <= 30 * FILE
    assert all(is_served(store, name) for name in store.block_ids())
    for _ in range(3):
        clock.now += 10
        store.tick()
        put(store, make_path(8, seed=int(clock.now)))
    disk.others = 0
    clock.now += 10
    store.tick()
    for seed in range(20, 25):
        assert put(store, make_path(8, seed=seed)) == [Outcome.OK] * 8
    assert file_bytes(scratch) == 40 * FILE
    assert warnings(caplog, "disk") == 1 and store.counters()["directory_pauses"] == 0
    check_ledgers(store)


def test_a_disk_full_from_the_start_drops_saves(
    store: DiskStore, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a quota is used up: there seems to be room."""
    clock = Clock(time.time())
    store.directories[0].clock = clock
    for hook in ("on_create", "on_write"):
        setattr(faults, hook, ENOSPC)
        assert put(store, make_path(3)) == [Outcome.NO_SPACE] * 3
        setattr(faults, hook, nothing)
        clock.now += 10
        store.tick()
    assert store.counters()["directory_pauses"] == 0
    assert warnings(caplog, "the disk is full") == 1
    assert put(store, make_path(3)) == [Outcome.OK] * 3
