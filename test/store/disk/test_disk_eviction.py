"""Who leaves for room or by age, whichever server or model stored it and whoever uses it."""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import DiskStore
from sglang_hc.store.disk.eviction import BATCH_BLOCKS, PAGE
from sglang_hc.store.disk.maintenance import COUNT_S
from sglang_hc.store.outcome import Outcome
from support.clock import Clock
from support.disk_filling import fill, left, names
from support.disk_store import (
    FILE,
    Faults,
    FaultyBackend,
    block_files,
    check_ledgers,
    file_bytes,
    make_path,
    open_store,
    path_of_block,
    put,
)


def test_the_least_recently_used_make_room(store: DiskStore, clock: Clock) -> None:
    fill(store, range(5), clock)
    assert len(store) == 40 and not store.counters()["evicted_blocks"]
    clock.now += 60
    store.touch(names(1))
    fill(store, range(5, 9), clock)
    assert left(store) == [1, 5, 6, 7, 8]
    assert store.counters()["evicted_blocks"] == 32
    check_ledgers(store)


@pytest.mark.parametrize("touched", [False, True])
def test_a_prefix_ages_from_its_end(scratch: Path, clock: Clock, touched: bool) -> None:
    """Evicting a parent before its child would leave the child unreachable."""
    store = open_store(scratch, size=10 * FILE, clock=clock)
    path = make_path(10)
    put(store, path)
    if touched:
        clock.now += 60
        store.touch([block.block_id for block in path])
    for gone in range(1, 10):
        clock.now += 60
        put(store, make_path(1, seed=gone))
        assert store.contains([block.block_id for block in path]) == 10 - gone


def test_what_a_waiting_request_needs_is_not_evicted(store: DiskStore, clock: Clock) -> None:
    fill(store, range(1), clock)
    store.expect(dict.fromkeys(names(0), 3.0))
    fill(store, range(1, 12), clock)
    assert left(store) == [0, 8, 9, 10, 11]
    store.expect(dict.fromkeys(names(0)))
    fill(store, range(12, 14), clock)
    assert 0 not in left(store), "nobody needs it any more"


def test_when_all_is_needed_what_is_needed_last_goes_first(store: DiskStore, clock: Clock) -> None:
    ranks = random.Random(4).sample(range(12), 12)
    for seed, rank in enumerate(ranks):
        store.expect(dict.fromkeys(names(seed), float(rank)))
        fill(store, range(seed, seed + 1), clock)
    kept = {ranks[seed] for seed in left(store)}
    assert {0, 1, 2, 3} <= kept <= {0, 1, 2, 3, 4, ranks[-1]}
    check_ledgers(store)


def test_the_file_of_a_block_that_goes_is_written_over(scratch: Path, clock: Clock) -> None:
    """One goes for one, and no file is made or removed."""
    store = open_store(scratch, size=16 * FILE, clock=clock)
    fill(store, range(2), clock)
    files = {path.stat().st_ino for path in block_files(scratch)}
    fill(store, range(2, 5), clock)
    assert {path.stat().st_ino for path in block_files(scratch)} == files
    assert left(store) == [3, 4] and store.counters()["evicted_blocks"] == 24


@pytest.mark.parametrize("count", [PAGE - 1, PAGE + 1, 9 * PAGE])
def test_blocks_are_evicted_in_order_beyond_a_page(scratch: Path, clock: Clock, count: int) -> None:
    """All but those that were used last are needed by somebody."""
    store = open_store(scratch, size=count * FILE, clock=clock)
    folder = store.directories[0].folder
    store.close()
    ids = [number.to_bytes(16, "little") for number in range(count)]
    for number, block_id in enumerate(ids):
        path = Path(folder.block_path(block_id))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, ns=(number, number + 1))
    store = open_store(scratch, size=count * FILE, clock=clock)
    store.expect(dict.fromkeys(ids[:-1], 1.0))
    put(store, make_path(1))
    assert store.contains(ids) == count - 1
    assert sum(1 for _ in block_files(scratch)) == count


def test_a_smaller_budget_is_kept_after_a_round_of_upkeep(scratch: Path, clock: Clock) -> None:
    store = open_store(scratch, clock=clock)
    fill(store, range(20), clock)
    store.close()
    store = open_store(scratch, size=20 * FILE, clock=clock)
    assert put(store, make_path(1, seed=99)) == [Outcome.NO_SPACE], "it has not caught up"
    assert file_bytes(scratch) < 160 * FILE, "but it has begun"
    store.tick()
    assert file_bytes(scratch) == 20 * FILE and left(store) == [18, 19]
    assert put(store, make_path(1, seed=99)) == [Outcome.OK]
    check_ledgers(store)


# -- age ------------------------------------------------------------------------------------------


def test_blocks_expire(scratch: Path, clock: Clock) -> None:
    store = open_store(scratch, ttl_s=3600, clock=clock)
    put(store, [*make_path(8, seed=1), *make_path(8, seed=2)])
    clock.now += 3000
    store.touch(names(2))
    clock.now += 1000
    store.tick()
    assert left(store) == [2]
    assert store.counters()["expired_blocks"] == 8
    check_ledgers(store)
    store.close()
    clock.now += 4000
    store = open_store(scratch, ttl_s=3600, clock=clock)
    store.tick()
    assert len(store) == 0, "expired while nothing was running"
    assert file_bytes(scratch) == 0


@pytest.mark.parametrize("count", [BATCH_BLOCKS, 3 * BATCH_BLOCKS + 1])
def test_all_that_is_too_old_expires_in_one_round(scratch: Path, clock: Clock, count: int) -> None:
    """Unless another server used it: then it stays, and those behind it still go."""
    store = open_store(scratch, size=400 * FILE, ttl_s=3600, clock=clock)
    blocks = make_path(count)
    put(store, blocks)
    other = open_store(scratch, size=400 * FILE, clock=clock)
    store.tick()
    clock.now += 3000
    used = [block.block_id for block in blocks[-BATCH_BLOCKS:]]  # the first to be looked at
    other.touch(used)
    other.directories[0].note_touches()
    clock.now += 1000
    store.tick()
    assert sorted(store.block_ids()) == sorted(used)
    check_ledgers(store)


# -- files that are removed by hand ---------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_room_that_was_made_by_hand_is_used(
    scratch: Path, store: DiskStore, clock: Clock, shared: bool
) -> None:
    """Who is alone finds out as soon as it evicts; the others count now and then."""
    fill(store, range(5), clock)
    if shared:
        open_store(scratch, size=40 * FILE, clock=clock)
    store.tick()
    for block_id in (name for seed in range(4) for name in names(seed)):
        path_of_block(store, block_id).unlink()
    clock.now += COUNT_S
    if shared:
        store.tick()
    fill(store, range(10, 14), clock)
    assert left(store) == [4, 10, 11, 12, 13], "nothing had to go"
    check_ledgers(store)


def test_a_file_that_cannot_be_removed_stops_eviction_once(scratch: Path, clock: Clock) -> None:
    """It was the first to go for every write."""
    faults = Faults()
    store = open_store(scratch, size=16 * FILE, clock=clock, backend=FaultyBackend(faults))
    fill(store, range(2), clock)
    stuck = path_of_block(store, names(0)[-1])

    def refuse(path: str) -> None:
        if path == str(stuck):
            raise PermissionError(1, "Operation not permitted", path)

    faults.on_take = refuse
    clock.now += 60
    assert put(store, make_path(3, seed=9)) == [Outcome.IO_ERROR, Outcome.OK, Outcome.OK]
    check_ledgers(store)


def test_a_folder_in_place_of_a_file_is_evicted_too(scratch: Path, clock: Clock) -> None:
    store = open_store(scratch, size=16 * FILE, clock=clock)
    fill(store, range(2), clock)
    path = path_of_block(store, names(0)[-1])
    path.unlink()
    (path / "deep").mkdir(parents=True)
    fill(store, range(2, 3), clock)
    assert not path.exists() and left(store) == [1, 2]


# -- the thread -----------------------------------------------------------------------------------


def test_background_upkeep_runs_and_stops(scratch: Path) -> None:
    store = open_store(scratch, background=True)
    assert any(thread.name == "hc-disk-maintenance" for thread in threading.enumerate())
    store.close()
    assert not any(thread.name == "hc-disk-maintenance" for thread in threading.enumerate())


def test_a_round_that_fails_is_counted_and_the_next_one_goes_on(
    scratch: Path, clock: Clock
) -> None:
    """One exception ended the backup thread for good in another store."""
    store = open_store(scratch, clock=clock, ttl_s=10)
    put(store, make_path(2))
    shutil.rmtree(scratch / "sglang-hc" / "servers")
    (scratch / "sglang-hc" / "servers").touch()
    clock.now += 1000
    store.tick()
    assert store.counters()["maintenance_errors"] == 1 and len(store) == 2
    (scratch / "sglang-hc" / "servers").unlink()
    store.tick()
    clock.now += 1000
    store.tick()
    assert store.counters()["maintenance_errors"] == 1 and len(store) == 0


# -- other models, and other parts of this one ----------------------------------------------------

OTHER = BlockLayout(LayerPlan(0, 4, 0), StateShape(4, 128, (64, 64), "float16"))


def test_two_models_evict_each_others_oldest_blocks_for_ever(
    scratch: Path, store: DiskStore, clock: Clock
) -> None:
    """Once the blocks of the other that were known at first were gone, only the own ones went."""
    other = open_store(
        scratch, size=40 * FILE, layout=OTHER, fingerprint=OTHER.fingerprint("other"), clock=clock
    )
    for turn in range(12):
        for one in (store, other):
            clock.now += 60
            one.tick()
        for one in (store, other):
            fill(one, range(turn, turn + 1), clock)
        assert file_bytes(scratch) <= 40 * FILE
        for one in (store, other):
            one.directories[0].find_others()
        if turn > 3:
            mine, theirs = left(store), left(other)
            assert mine[-1:] == [turn] and theirs[-1:] == [turn]
            assert abs(len(mine) - len(theirs)) <= 1, "they age alike"
            assert file_bytes(scratch) > 40 * FILE - 2 * other.model.file_bytes
    check_ledgers(store)


def test_uses_by_the_server_of_another_model_are_respected(
    scratch: Path, store: DiskStore, clock: Clock
) -> None:
    """Ranks of one server are such servers: each has its own part of all blocks."""
    other = open_store(scratch, size=40 * FILE, clock=clock, part=b"p" * 16)
    fill(store, range(2), clock)
    fill(other, range(2, 5), clock)
    other.tick()
    fill(other, range(5, 6), clock)
    other.directories[0].find_others()
    store.directories[0].find_others()
    assert left(store) == [1] and left(other) == [2, 3, 4, 5]
    clock.now += 60
    store.touch(names(1))
    store.directories[0].note_touches()
    fill(other, range(6, 8), clock)
    store.directories[0].find_others()
    assert left(store) == [1] and left(other) == [4, 5, 6, 7]
