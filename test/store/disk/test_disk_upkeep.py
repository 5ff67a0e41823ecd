"""What the store does on its own: who leaves for room or by age, and what the scrubber finds."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import weakref
from contextlib import closing
from pathlib import Path

import pytest

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import eviction
from sglang_hc.store.disk.index_file import Place
from sglang_hc.store.outcome import Outcome
from support.clock import Clock
from support.disk_store import (
    SMALL,
    data_of,
    make_path,
    open_store,
    put,
    read_bytes,
    total_bytes,
)

START = 1_700_000_000.0


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    clock = Clock(START)
    store = open_store(tmp_path, clock=clock)
    old, kept = make_path(8, seed=1), make_path(8, seed=2)
    put(store, old)
    put(store, kept)
    seed = 3
    while store.counters()["evicted_blocks"] == 0:
        clock.now += 60
        store.touch([block.block_id for block in kept])
        assert set(put(store, make_path(8, seed=seed))) == {Outcome.OK}
        seed += 1
    assert store.contains([block.block_id for block in kept]) == 8
    assert store.contains([old[-1].block_id]) == 0
    store.check_integrity()
    store.close()


def test_a_prefix_ages_from_its_end(tmp_path: Path) -> None:
    """Evicting a parent before its child would leave the child unreachable."""
    clock = Clock(START)
    store = open_store(tmp_path, clock=clock)
    path = make_path(10)
    put(store, path)
    store.touch([block.block_id for block in path])
    directory = store.directories[0]
    directory.flush_touches()
    order = [resident.block_id for resident in directory.index.oldest(10)]
    assert order == [block.block_id for block in reversed(path)]
    store.close()


def names(seed: int) -> list[bytes]:
    return [block.block_id for block in make_path(8, seed=seed)]


def test_what_a_waiting_request_needs_is_not_evicted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, make_path(8, seed=1))
    store.expect(dict.fromkeys(names(1), 3.0))
    for seed in range(2, 14):
        put(store, make_path(8, seed=seed))
    assert store.counters()["evicted_blocks"] > 0
    assert store.contains(names(1)) == 8
    store.expect(dict.fromkeys(names(1)))
    for seed in range(14, 26):
        put(store, make_path(8, seed=seed))
    assert store.contains(names(1)) < 8, "nobody needs it any more"
    store.close()


def test_when_all_is_needed_what_is_needed_last_goes_first(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ranks = random.Random(4).sample(range(12), 12)
    for seed, rank in enumerate(ranks):
        store.expect(dict.fromkeys(names(seed), float(rank)))
        assert put(store, make_path(8, seed=seed)) == [Outcome.OK] * 8
    left = [rank for seed, rank in enumerate(ranks) if store.contains(names(seed)) == 8]
    assert store.counters()["evicted_blocks"] > 0
    newest = ranks[-1]
    assert sorted({*left, newest}) == sorted({*range(len(left) - (newest >= len(left))), newest})
    store.check_integrity()
    store.close()


def test_a_write_is_refused_when_nothing_may_go(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fitting = 0
    while store.counters().get("evicted_blocks", 0) == 0:
        fitting += 1
        put(store, make_path(8, seed=fitting))
    (directory,) = store.directories
    leases = [directory.acquire(block_id) for block_id in store.block_ids()]
    answers = {status for seed in range(50, 54) for status in put(store, make_path(8, seed=seed))}
    assert answers == {Outcome.NO_SPACE}
    directory.slabs.unlease(leases)
    store.check_integrity()
    store.close()


def test_watermarks_leave_free_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "HIGH", 0.6)
    monkeypatch.setattr(eviction, "LOW", 0.5)
    store = open_store(tmp_path)
    for seed in range(12):
        put(store, make_path(4, seed=seed))
        store.tick()
    slots = store.directories[0].slabs
    taken, there = slots.usage(store.model.slot_bytes)
    there += slots.growable_slots(store.model.slot_bytes)
    assert taken <= 0.6 * there + 1
    store.check_integrity()
    store.close()


def test_blocks_expire(tmp_path: Path) -> None:
    clock = Clock(START)
    store = open_store(tmp_path, ttl_s=3600, clock=clock)
    old, used = make_path(3, seed=1), make_path(3, seed=2)
    put(store, old + used)
    clock.now += 3000
    store.touch([block.block_id for block in used])
    clock.now += 1000
    store.tick()
    assert store.contains([old[0].block_id]) == 0
    assert store.contains([block.block_id for block in used]) == 3
    assert store.counters()["expired_blocks"] == 3
    store.close()
    clock.now += 4000
    store = open_store(tmp_path, ttl_s=3600, clock=clock)
    assert store.contains([used[0].block_id]) == 0, "expired while nothing was running"
    store.close()


def test_hits_survive_in_the_index(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    blocks = make_path(2)
    put(store, blocks)
    for _ in range(3):
        read_bytes(store, blocks[0].block_id)
    store.close()
    with closing(sqlite3.connect(tmp_path / "sglang-hc" / "index.sqlite")) as index:
        hits = dict(index.execute("SELECT block_id, hits FROM blocks"))
    assert hits == {blocks[0].block_id: 3, blocks[1].block_id: 0}


def test_models_share_a_directory_one_after_the_other(tmp_path: Path) -> None:
    """Another slot size: slabs go from the old model to the new one, the oldest first."""
    clock = Clock(START)
    store = open_store(tmp_path, clock=clock)
    for seed in range(12):
        put(store, make_path(8, seed=seed))
    store.close()
    clock.now += 1000
    other = BlockLayout(LayerPlan(0, 4, 0), StateShape(4, 128, (64, 64), "float16"))
    fingerprint = other.fingerprint("other")
    store = open_store(tmp_path, layout=other, fingerprint=fingerprint, clock=clock)
    blocks = make_path(6, seed=50, fingerprint=fingerprint)
    sized = [(block, memoryview(data_of(block, other.slot_bytes))) for block in blocks]
    assert store.write_many(sized) == [Outcome.OK] * 6
    assert total_bytes(tmp_path) <= SMALL
    store.check_integrity()
    store.close()
    store = open_store(tmp_path, clock=clock)
    found = sum(store.contains([b.block_id]) for seed in range(12) for b in make_path(8, seed=seed))
    assert found > 0, "what was not in the way is still there"
    assert store.contains([blocks[0].block_id]) == 0, "another model's blocks are never served"
    store.check_integrity()
    store.close()


def test_a_smaller_budget_holds_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, size=7_000_000)
    for seed in range(15):
        put(store, make_path(8, seed=seed))
    store.close()
    store = open_store(tmp_path, size=5_500_000)
    assert total_bytes(tmp_path) <= 5_500_000
    assert len(store.block_ids()) > 0
    store.check_integrity()
    store.close()


def test_background_maintenance_runs_and_stops(tmp_path: Path) -> None:
    store = open_store(tmp_path, background=True, scrub_bytes_per_s=10_000_000)
    put(store, make_path(3))
    store.tick()
    assert store.counters()["scrubbed_bytes"] > 0
    store.close()
    assert not any(thread.name == "hc-disk-maintenance" for thread in threading.enumerate())


def test_scrub_finds_damage_nobody_asked_for(tmp_path: Path) -> None:
    store = open_store(tmp_path, scrub_bytes_per_s=10_000_000)
    blocks = make_path(4)
    put(store, blocks)
    assert store.drain_removed() == []
    slab, slot = Place.unpack(store.directories[0].places[blocks[1].block_id])
    path = tmp_path / "sglang-hc" / f"slab-{slab:08d}.dat"
    with path.open("r+b") as file:
        file.seek(4096 + slot * store.model.slot_bytes + 9000)
        file.write(b"flipped")
    store.tick()
    assert store.contains([block.block_id for block in blocks]) == 1
    counters = store.counters()
    assert counters["scrub_damaged"] == 1 and counters["maintenance_errors"] == 0
    assert store.drain_removed() == [blocks[1].block_id]
    assert len(store.directories[0].slabs.quarantined) == 1
    store.check_integrity()
    store.close()


def test_scrub_keeps_its_pace_and_stops_when_everything_is_damaged(tmp_path: Path) -> None:
    """One round over a lost slab removed all its blocks before the store could be closed."""
    store = open_store(tmp_path, scrub_bytes_per_s=8192)
    put(store, make_path(12))
    for slab in tmp_path.rglob("slab-*"):
        os.truncate(slab, 4096)
    store.tick()
    assert store.counters()["scrub_damaged"] == 2, "two pages' worth"
    store.stop_upkeep()
    store.tick()
    assert store.counters()["scrub_damaged"] == 2
    store.close()


def test_scrub_verifies_whole_blocks_and_keeps_its_pace_on_average(tmp_path: Path) -> None:
    """A block that is larger than a step's budget is paid for by the steps after it. No lease is
    held between steps, so the store may be closed at any time."""
    store = open_store(tmp_path, scrub_bytes_per_s=4096)
    put(store, make_path(3))
    size = store.model.slot_bytes
    for step in range(1, 18):
        store.tick()
        assert store.counters()["scrubbed_bytes"] == -(-step * 4096 // size) * size
        store.check_integrity()
    assert 2 * size < 17 * 4096 <= 3 * size, "one, two and three blocks were seen"
    store.stop_upkeep()
    store.close()


def test_blocks_of_a_clock_that_was_ahead_are_not_kept_for_ever(tmp_path: Path) -> None:
    """A clock was a year ahead until it was set right: what was written then must not be younger
    than all that is written in the next year."""
    clock = Clock(START + 365 * 86400)
    store = open_store(tmp_path, clock=clock)
    old = make_path(8, seed=1)
    put(store, old)
    store.close()
    clock.now = START
    store = open_store(tmp_path, clock=clock)
    assert {row.accessed for row in store.directories[0].index.oldest(8)} == {int(START * 1e6)}
    clock.now += 60
    seed = 2
    while store.counters()["evicted_blocks"] == 0:
        put(store, make_path(8, seed=seed))
        seed += 1
    assert store.contains([block.block_id for block in old]) < 8
    assert store.contains([block.block_id for block in make_path(8, seed=seed - 1)]) == 8
    store.check_integrity()
    store.close()


class Names(list):
    """A list that can be watched."""


def test_a_lost_directory_keeps_no_uses(tmp_path: Path) -> None:
    """Nobody writes them to its index: they were kept, up to gigabytes of identities."""
    store = open_store(tmp_path / "a", tmp_path / "b")
    store.directories[0].fail("injected")
    names = Names([bytes(16)])
    watched = weakref.ref(names)
    store.touch(names)
    del names
    store.tick()
    assert watched() is None
    store.close()
