"""When blocks were used last, as this server, others and the disk know it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_hc.store.disk import DiskStore
from sglang_hc.store.disk.directory import AHEAD_NS, NOTED_NS, TOUCHES_KEPT
from sglang_hc.store.disk.eviction import NEARLY_FULL
from support.clock import Clock
from support.disk_filling import fill, left, names
from support.disk_store import (
    FILE,
    Faults,
    FaultyBackend,
    check_ledgers,
    is_served,
    make_path,
    open_store,
    path_of_block,
    remove,
)


def test_uses_survive_a_restart(scratch: Path, store: DiskStore, clock: Clock) -> None:
    fill(store, range(5), clock)
    clock.now += 60
    store.touch(names(0))
    store.touch(names(2))
    store.close()
    store = open_store(scratch, size=40 * FILE, clock=clock)
    fill(store, range(5, 8), clock)
    assert left(store) == [0, 2, 5, 6, 7]


def test_uses_bring_blocks_to_the_end_of_the_order(store: DiskStore, clock: Clock) -> None:
    """Which decides where there are more than are sorted at once. What is gone stays gone."""
    fill(store, range(3), clock)
    (directory,) = store.directories
    store.touch(names(0))
    directory.note_touches()
    assert list(directory.blocks)[-8:] == names(0)[::-1]
    directory.used_elsewhere(names(1)[0], int(clock.now * 1e9))
    assert list(directory.blocks)[-1] == names(1)[0]
    remove(store, names(1))
    directory.used_elsewhere(names(1)[0], int(clock.now * 1e9))
    clock.now += 60
    store.touch(names(1) + names(2))
    directory.note_touches()
    assert left(store) == [0, 2] and list(directory.blocks)[:8] == names(0)[::-1]


def test_a_use_is_noted_on_the_disk_now_and_then(scratch: Path, clock: Clock) -> None:
    noted: list[str] = []
    faults = Faults()
    store = open_store(scratch, clock=clock, backend=FaultyBackend(faults))
    fill(store, range(1), clock)
    faults.on_note = noted.append
    (directory,) = store.directories
    for seconds in (0.0, NOTED_NS / 1e9 - 1, 1.0, NOTED_NS / 1e9 - 1, 1.0):
        clock.now += seconds
        store.touch(names(0))
        directory.note_touches()
    assert len(noted) == 8 * 2


@pytest.mark.parametrize("shared", [True, False])
def test_uses_of_another_server_are_respected(scratch: Path, clock: Clock, shared: bool) -> None:
    """Its files say when it used them; who is alone need not ask."""
    faults, asked = Faults(), []
    store = open_store(scratch, size=40 * FILE, clock=clock, backend=FaultyBackend(faults))
    fill(store, range(5), clock)
    other = open_store(scratch, size=40 * FILE, clock=clock) if shared else None
    store.tick()
    clock.now += 60
    if other is not None:
        assert all(is_served(other, block) for block in make_path(8, seed=0))
        other.touch(names(0))
        other.directories[0].note_touches()
    faults.on_stat = asked.append
    fill(store, range(5, 7), clock)
    assert left(store) == ([0, 3, 4, 5, 6] if shared else [2, 3, 4, 5, 6])
    if other is not None:
        other.directories[0].find_others()
        assert left(other) == left(store)
        other.close()
    assert bool(asked) == shared or len(asked) == 16, "only whether the name is taken"
    check_ledgers(store)


@pytest.mark.parametrize("ahead", [AHEAD_NS, AHEAD_NS + 1])
def test_clocks_of_servers_may_differ_a_little(scratch: Path, clock: Clock, ahead: int) -> None:
    """What was used by a clock that is ahead must not be younger than all until then."""
    noted: list[str] = []
    faults = Faults()
    store = open_store(scratch, clock=clock)
    fill(store, range(1), clock)
    path = path_of_block(store, names(0)[0])
    now = int(clock.now * 1e9)
    os.utime(path, ns=(now, now + ahead))
    store.close()
    faults.on_note = noted.append
    store = open_store(scratch, clock=clock, backend=FaultyBackend(faults))
    (directory,) = store.directories
    directory.learn_uses()
    assert directory.blocks[names(0)[0]] == now
    assert noted == ([] if ahead == AHEAD_NS else [str(path)])


@pytest.mark.parametrize("used", [0.9, 0.95])
def test_uses_are_learned_when_room_is_nearly_gone(
    scratch: Path, clock: Clock, used: float
) -> None:
    """With a million blocks that takes seconds: not at each start, and not in a write."""
    store = open_store(scratch, size=160 * FILE, clock=clock)
    fill(store, range(round(160 * used / 8)), clock)
    store.close()
    store = open_store(scratch, size=160 * FILE, clock=clock)
    store.tick()
    assert store.directories[0].knows_uses == (used > NEARLY_FULL)


@pytest.mark.parametrize("more", [0, 1])
def test_so_many_uses_are_kept_until_they_are_noted(
    store: DiskStore, clock: Clock, more: int
) -> None:
    fill(store, range(1), clock)
    store.tick()
    clock.now += 60
    store.touch(names(0)[:1])
    for _ in range(TOUCHES_KEPT - 1 + more):
        store.touch(())
    (directory,) = store.directories
    directory.note_touches()
    used = path_of_block(store, names(0)[0]).stat().st_mtime
    assert (used == clock.now) == (more == 0), "the oldest go"
