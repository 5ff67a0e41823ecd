"""Full disks, I/O errors, short reads and slow disks."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from sglang_hc.store.disk.index_file import IndexFull, Place, Row

from sglang_hc.store.circuit_breaker import FAILURES_TO_OPEN
from sglang_hc.store.disk import eviction
from sglang_hc.store.disk.directory import DirectoryError
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    EIO,
    ENOSPC,
    Faults,
    FaultyBackend,
    data_of,
    empty_slot,
    failing,
    make_path,
    open_store,
    put,
    read_block,
    read_bytes,
    remove,
    slots_taken,
)
from support.waiting import HANGS_S, until


def nothing(path: str) -> None:
    """A hook that lets everything through."""


def test_an_unreadable_block_is_a_miss_once(scratch: Path) -> None:
    """A block that could not be read was offered again and again in another store."""
    faults = Faults()
    store = open_store(scratch, backend=FaultyBackend(faults))
    blocks = make_path(3)
    put(store, blocks)
    faults.on_read = EIO
    assert read_bytes(store, blocks[1].block_id)[0] is Outcome.IO_ERROR
    faults.on_read = nothing
    assert store.contains([block.block_id for block in blocks]) == 1
    assert read_bytes(store, blocks[1].block_id)[0] is Outcome.MISSING
    assert len(store.directories[0].slabs.quarantined) == 1
    assert put(store, [blocks[1]]) == [Outcome.OK], "in another slot"
    assert read_bytes(store, blocks[1].block_id)[0] is Outcome.OK
    store.check_integrity()
    store.close()


def test_a_failed_write_or_sync_is_not_visible(scratch: Path) -> None:
    """A failed store that stayed visible gave gibberish later in another store."""
    faults = Faults()
    store = open_store(scratch, backend=FaultyBackend(faults))
    blocks = make_path(4)
    put(store, blocks[:1])
    for hook in ("on_write", "on_sync"):
        setattr(faults, hook, EIO)
        assert put(store, blocks[1:]) == [Outcome.IO_ERROR] * 3
        setattr(faults, hook, nothing)
        assert store.contains([block.block_id for block in blocks]) == 1
        store.check_integrity()
    assert put(store, blocks[1:]) == [Outcome.OK] * 3
    store.check_integrity()
    store.close()


def only_in(folder: str, hook: Callable[[str], None]) -> Callable[[str], None]:
    """The hook for the files below a folder of that name."""
    return lambda path: hook(path) if f"/{folder}/" in path else None


def test_a_failed_directory_of_two_fails_only_its_own_blocks(scratch: Path) -> None:
    faults = Faults()
    store = open_store(scratch / "a", scratch / "b", backend=FaultyBackend(faults))
    blocks = make_path(4)
    put(store, blocks)
    assert remove(store, [block.block_id for block in blocks]) == 4, "their slabs stay"
    faults.on_sync = only_in("b", EIO)
    assert put(store, blocks) == [Outcome.OK, Outcome.IO_ERROR] * 2
    faults.on_sync = nothing
    store.check_integrity()
    assert slots_taken(store) == [2, 0]
    assert put(store, blocks) == [Outcome.DUPLICATE, Outcome.OK] * 2
    assert store.contains([block.block_id for block in blocks]) == 4
    store.close()


def test_one_of_two_directories_destroyed_while_running(
    scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks are lost, the other one's are served, writes go on, and it is said once."""
    faults = Faults()
    now = [1e9]
    store = open_store(
        scratch / "a", scratch / "b", backend=FaultyBackend(faults), clock=lambda: now[0]
    )
    blocks = make_path(6 * FAILURES_TO_OPEN)
    names = [block.block_id for block in blocks]
    assert set(put(store, blocks)) == {Outcome.OK}
    dead = only_in("b", EIO)
    faults.on_read = faults.on_write = faults.on_sync = faults.on_allocate = dead
    for turn in range(2):
        for block in blocks[::2]:
            status, got = read_bytes(store, block.block_id)
            assert status is Outcome.OK and np.array_equal(got, data_of(block))
        for name in names[1::2]:
            assert read_bytes(store, name)[0] is not Outcome.OK, turn
    fresh = make_path(12, seed=9)
    assert put(store, fresh) == [Outcome.OK] * 12, "all to the one that is left"
    assert store.contains([block.block_id for block in fresh]) == 12
    assert store.counters()["directory_pauses"] == 1
    assert sum("keeps failing" in record.getMessage() for record in caplog.records) == 1
    assert len(store.in_use()) == 1 and len(store.in_use())
    store.tick()
    faults.on_read = faults.on_write = faults.on_sync = faults.on_allocate = nothing
    now[0] += 6
    left = [name for name in names[1::2] if store.contains([name])]
    assert left, "what it was not asked for while it failed is there again"
    assert all(read_bytes(store, name)[0] is Outcome.OK for name in left)
    assert len(store.in_use()) == 2
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_one_of_two_devices_that_fails_at_the_start(
    scratch: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The server starts with the other one; it does not start with none."""
    faults = Faults()
    folders = [scratch / "a", scratch / "b"]
    store = open_store(*folders, backend=FaultyBackend(faults))
    blocks = make_path(6)
    put(store, blocks)
    store.close()
    for bad, served in (("a", blocks[1::2]), ("b", blocks[::2])):
        faults.on_read = only_in(bad, failing(code))
        store = open_store(*folders, backend=FaultyBackend(faults))
        assert f"--hc-disk {scratch / bad}: cannot be used" in caplog.text
        assert sorted(store.block_ids()) == sorted(block.block_id for block in served)
        for block in served:
            assert read_bytes(store, block.block_id)[0] is Outcome.OK
        store.close()
    faults.on_read = failing(code)
    with pytest.raises(DirectoryError, match=r"--hc-disk .*: cannot be used"):
        open_store(*folders, backend=FaultyBackend(faults))
    faults.on_read = nothing
    store = open_store(*folders, backend=FaultyBackend(faults))
    assert store.contains([block.block_id for block in blocks]) == 6, "nothing was locked or lost"
    store.close()


def test_a_block_in_two_directories_is_served_from_the_one_that_is_well(scratch: Path) -> None:
    """It was written again while the first could not be asked."""
    store = open_store(scratch / "a", scratch / "b", backend=FaultyBackend(Faults()))
    (block,) = make_path(1)
    first, second = store.directories
    assert put(store, [block]) == [Outcome.OK] and block.block_id in first.places
    while not first.breaker.failed():
        assert store.contains([block.block_id]) == 1
    assert store.contains([block.block_id]) == 0
    assert put(store, [block]) == [Outcome.OK] and block.block_id in second.places
    first.breaker.succeeded()
    place = first.acquire(block.block_id)
    assert place is not None and store.directory_of(block.block_id) is first
    assert first.drop_damaged(Row(first.number, block.block_id, *place))
    first.slabs.unlease([place])
    status, got = read_bytes(store, block.block_id)
    assert status is Outcome.OK and np.array_equal(got, data_of(block))
    assert remove(store, [block.block_id]) == 1
    store.check_integrity()
    store.close()


def test_a_full_disk_uses_the_slots_there_are(scratch: Path) -> None:
    faults = Faults()
    store = open_store(scratch, backend=FaultyBackend(faults))
    put(store, make_path(6, seed=1))
    slots = store.directories[0].slabs.usage(store.model.slot_bytes)[1]
    faults.on_allocate = ENOSPC
    for seed in range(2, 8):
        assert set(put(store, make_path(4, seed=seed))) == {Outcome.OK}
    assert store.directories[0].slabs.usage(store.model.slot_bytes)[1] == slots
    assert store.counters()["evicted_blocks"] > 0
    store.check_integrity()
    store.close()


def test_a_disk_full_from_the_start_drops_saves(scratch: Path) -> None:
    faults = Faults(on_allocate=ENOSPC)
    store = open_store(scratch, backend=FaultyBackend(faults))
    assert put(store, make_path(3)) == [Outcome.NO_SPACE] * 3
    faults.on_allocate, faults.on_write = nothing, ENOSPC
    store.directories[0].slabs._growth_resumes = 0.0
    assert put(store, make_path(3)) == [Outcome.NO_SPACE] * 3
    store.check_integrity()
    store.close()


def test_short_reads_are_damage(scratch: Path) -> None:
    faults = Faults()
    store = open_store(scratch, backend=FaultyBackend(faults))
    blocks = make_path(2)
    put(store, blocks)
    faults.short = 512
    assert read_bytes(store, blocks[0].block_id)[0] is Outcome.DAMAGED
    faults.short = 0
    assert read_bytes(store, blocks[1].block_id)[0] is Outcome.OK
    store.close()


def test_a_disk_that_keeps_failing_is_left_alone_for_a_while(scratch: Path) -> None:
    faults = Faults()
    now = [1e9]
    store = open_store(scratch, backend=FaultyBackend(faults), clock=lambda: now[0])
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
    now[0] += 6
    assert store.contains(last) == 1, "asked again after the pause"
    assert read_bytes(store, blocks[-2].block_id)[0] is Outcome.IO_ERROR
    assert store.contains(last) == 0, "one failure is enough for the next, longer pause"
    now[0] += 6
    assert store.contains(last) == 0
    now[0] += 6
    faults.on_read = nothing
    assert read_bytes(store, blocks[-1].block_id)[0] is Outcome.OK
    assert store.in_use()
    store.close()


def test_a_slow_disk_holds_up_nobody_but_its_own_reader(scratch: Path) -> None:
    """Lookups stay in memory, and a read whose deadline has passed is not begun."""
    faults, writes, goes_on = Faults(), threading.Event(), threading.Event()
    store = open_store(scratch, backend=FaultyBackend(faults))
    blocks = make_path(4)

    def hold(path: str) -> None:
        writes.set()
        assert goes_on.wait(HANGS_S)

    faults.on_write = hold
    writer = threading.Thread(target=put, args=(store, blocks))
    writer.start()
    assert writes.wait(HANGS_S)
    for _ in range(20):
        assert store.contains([block.block_id for block in blocks]) == 0
    goes_on.set()
    writer.join()
    into = empty_slot()
    late = time.monotonic() - 1
    assert read_block(store, blocks[0].block_id, into, deadline=late) is Outcome.TIMED_OUT
    assert store.contains([blocks[0].block_id]) == 1, "slow is not damaged"
    assert read_block(store, blocks[0].block_id, into) is Outcome.OK
    assert np.array_equal(into, data_of(blocks[0]))
    store.check_integrity()
    store.close()


def test_a_failing_maintenance_round_is_counted_and_tried_again(scratch: Path) -> None:
    """One exception ended the backup thread for good in another store."""
    store = open_store(scratch, background=True, scrub_bytes_per_s=1 << 20)
    put(store, make_path(2))
    failed = threading.Event()

    def trim(evictor: Evictor) -> None:
        failed.set()
        raise RuntimeError("injected")

    with mock.patch.object(Evictor, "trim", trim):
        assert failed.wait(HANGS_S)
    before = store.counters()["scrubbed_bytes"]
    until(lambda: store.counters()["scrubbed_bytes"] > before)
    assert store.counters()["maintenance_errors"] >= 1
    store.close()


def test_a_write_that_fails_goes_to_the_other_directory(scratch: Path) -> None:
    faults = Faults()
    store = open_store(scratch / "a", scratch / "b", backend=FaultyBackend(faults))
    blocks = make_path(6)
    for hook in (EIO, ENOSPC):
        some, blocks = blocks[:3], blocks[3:]
        faults.on_write = only_in("a", hook)
        items = [(block, memoryview(data_of(block))) for block in some]
        assert store.write_many(items, store.directories[0]) == [Outcome.OK] * 3
        faults.on_write = nothing
        for block in some:
            status, got = read_bytes(store, block.block_id)
            assert status is Outcome.OK and np.array_equal(got, data_of(block))
        store.check_integrity()
    assert slots_taken(store) == [0, 6]
    store.close()


def test_a_damaged_slot_stays_out_of_use_though_its_row_cannot_be_deleted_at_once(
    scratch: Path,
) -> None:
    store = open_store(scratch)
    directory = store.directories[0]
    (block,) = make_path(1)
    put(store, [block])
    place = directory.acquire(block.block_id)
    assert place is not None
    with mock.patch.object(directory.index, "delete", side_effect=IndexFull("injected")):
        assert directory.drop_damaged(Row(directory.number, block.block_id, *place))
    directory.slabs.unlease([place])
    directory.retry_removals()
    assert len(directory.slabs.quarantined) == 1 and slots_taken(store) == [1]
    assert put(store, [block]) == [Outcome.OK]
    assert Place.unpack(directory.places[block.block_id]) != place
    store.check_integrity()
    assert directory.drop_slab(place.slab) and not directory.slabs.quarantined
    store.check_integrity()
    store.close()


def test_nothing_is_evicted_in_vain(scratch: Path) -> None:
    """While the index refused to delete rows, each write evicted further pages of blocks, none of
    whose slots became free."""
    store = open_store(scratch)
    directory = store.directories[0]
    for seed in range(store.capacity // 4 + 1):
        put(store, make_path(4, seed=seed))
    assert store.counters()["evicted_blocks"] > 0
    full = len(store)
    with (
        mock.patch.object(eviction, "_PAGE", 4),
        mock.patch.object(directory.index, "delete", side_effect=IndexFull("injected")),
    ):
        assert put(store, make_path(2, seed=99)) == [Outcome.NO_SPACE] * 2
        store.tick()
    assert len(store) == full - 1
    assert put(store, make_path(2, seed=99)) == [Outcome.OK] * 2
    store.check_integrity()
    store.close()


def test_a_removal_put_off_does_not_hit_the_block_that_came_back(scratch: Path) -> None:
    """Its row was deleted when the index took changes again, though it lay in that slot anew."""
    store = open_store(scratch)
    directory = store.directories[0]
    (block,) = make_path(1)
    put(store, [block])
    place = Place.unpack(directory.places[block.block_id])
    with mock.patch.object(directory.index, "delete", side_effect=IndexFull("injected")):
        assert remove(store, [block.block_id]) == 1
    assert put(store, [block]) == [Outcome.OK]
    assert remove(store, [block.block_id]) == 1
    taken = []
    while free := directory.slabs.allocate(store.model.slot_bytes):
        taken.append(free)
    directory.slabs.release(taken)
    directory.slabs.unlease([place])
    assert put(store, [block]) == [Outcome.OK] and directory.places[block.block_id] == place.pack()
    directory.slabs.unlease(other for other in taken if other != place)
    directory.retry_removals()
    store.check_integrity()
    assert read_bytes(store, block.block_id)[0] is Outcome.OK
    store.close()
