"""What goes when a directory is full, where blocks are dealt to, and what age does."""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.store.disk import Block, DiskStore
from sglang_hc.store.disk.victims import PAGE
from sglang_hc.store.disk.writer import Dealer
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    FILE,
    block_files,
    check_ledgers,
    is_served,
    make_path,
    open_store,
    put,
    read_bytes,
)


class Clock:
    """Seconds since 1970 that stand still until somebody moves them."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def names(blocks: list[Block]) -> list[bytes]:
    return [block.block_id for block in blocks]


def here(store: DiskStore, blocks: list[Block]) -> list[int]:
    """Which of these are found, by their places in the list."""
    return [n for n, block in enumerate(blocks) if store.contains([block.block_id])]


def put_apart(store: DiskStore, clock: Clock, count: int, seed: int = 0) -> list[Block]:
    """Blocks of prefixes of their own, each a minute younger than the one before."""
    blocks = [make_path(1, seed=seed * 1000 + number)[0] for number in range(count)]
    for block in blocks:
        clock.now += 60
        assert put(store, [block]) == [Outcome.OK]
    return blocks


@pytest.mark.parametrize("spare", [0, FILE - 1])
def test_files_never_take_more_than_the_budget(scratch: Path, spare: int) -> None:
    clock = Clock()
    store = open_store(scratch, size=8 * FILE + spare, clock=clock)
    for count in range(1, 20):
        put_apart(store, clock, 1, seed=count)
        assert len([*block_files(scratch)]) == min(count, 8)
        check_ledgers(store)
    assert store.capacity == 8 and store.counters()["evicted_blocks"] == 11
    store.close()


def test_the_longest_unused_goes_first_and_a_use_survives_a_restart(scratch: Path) -> None:
    clock = Clock()
    store = open_store(scratch, size=6 * FILE, clock=clock)
    blocks = put_apart(store, clock, 6)
    clock.now += 60
    store.touch(names(blocks[:1]))
    more = put_apart(store, clock, 1, seed=1)
    assert here(store, blocks) == [0, 2, 3, 4, 5]
    store.touch(names(blocks[2:3]))
    store.close()
    store = open_store(scratch, size=6 * FILE, clock=clock)
    put_apart(store, clock, 3, seed=2)
    assert here(store, blocks) == [0, 2], "both were used after the others"
    assert here(store, more) == [0]
    check_ledgers(store)
    store.close()


def test_a_prefix_goes_from_its_end(scratch: Path) -> None:
    """Written from its beginning, found again after a restart: a block never outlives what it
    continues."""
    clock = Clock()
    path = make_path(8)
    for reopened in (False, True):
        folder = scratch / str(reopened)
        store = open_store(folder, size=8 * FILE, clock=clock)
        put(store, path)
        if reopened:
            store.close()
            store = open_store(folder, size=8 * FILE, clock=clock)
        for gone in range(1, 4):
            put_apart(store, clock, 1, seed=gone)
            assert here(store, path) == list(range(8 - gone))
        clock.now += 60
        store.touch(names(path))
        put_apart(store, clock, 3, seed=9)
        assert here(store, path) == list(range(5)), "it was used after those that came before"
        store.close()


def test_what_is_needed_goes_last_and_what_is_needed_last_first(scratch: Path) -> None:
    clock = Clock()
    store = open_store(scratch, size=4 * FILE, clock=clock)
    blocks = put_apart(store, clock, 4)
    store.expect({blocks[0].block_id: 1.0, blocks[1].block_id: 3.0, blocks[2].block_id: 2.0})
    first = put_apart(store, clock, 1, seed=1)
    assert here(store, blocks) == [0, 1, 2], "the only one that nobody needs"
    store.expect({first[0].block_id: 4.0})
    put_apart(store, clock, 1, seed=2)
    assert here(store, first) == []
    store.expect({blocks[0].block_id: None})
    put_apart(store, clock, 1, seed=3)
    assert here(store, blocks) == [1, 2]
    check_ledgers(store)
    store.close()


@pytest.mark.parametrize("needed", [PAGE - 1, PAGE, PAGE + 1])
def test_needed_blocks_hide_no_other_one(scratch: Path, needed: int) -> None:
    """The longest unused are looked at a page at a time."""
    clock = Clock()
    store = open_store(scratch, size=(needed + 1) * FILE, clock=clock)
    directory = store.directories[0]
    waiting = [number.to_bytes(16, "big") for number in range(needed)]
    for name in waiting:
        directory.add(name, int(clock.now * 1e9) - 10**12)
    store.expect(dict.fromkeys(waiting, 1.0))
    (free,) = put_apart(store, clock, 1)
    with directory.ledger.held():
        directory.ledger.used = (needed + 1) * FILE
    assert put(store, make_path(1, seed=7)) == [Outcome.OK]
    assert not store.contains([free.block_id]) and len(store) == needed + 1
    store.close()


def test_blocks_of_other_models_go_by_their_age(scratch: Path) -> None:
    clock, other = Clock(), bytes(16)
    theirs = open_store(scratch, size=6 * FILE, clock=clock, fingerprint=other)
    foreign = [make_path(1, seed=n, fingerprint=other)[0] for n in range(4)]
    put(theirs, foreign)
    theirs.close()
    os.utime(theirs.directories[0].path(foreign[2].block_id), (2e9, 2e9))
    store = open_store(scratch, size=6 * FILE, clock=clock)
    blocks = put_apart(store, clock, 5)
    assert here(store, blocks) == [0, 1, 2, 3, 4]
    put_apart(store, clock, 1, seed=1)
    assert here(store, blocks) == [1, 2, 3, 4], "the other model's last one is younger"
    assert len([*block_files(scratch)]) == 6
    check_ledgers(store)
    store.close()


def test_age_removes_and_a_use_keeps(scratch: Path) -> None:
    clock = Clock()
    store = open_store(scratch, clock=clock, ttl_s=3600.0)
    blocks = put_apart(store, clock, 3)
    clock.now += 3000
    store.touch(names(blocks[1:2]))
    store.tick()
    clock.now += 1000
    store.tick()
    assert here(store, blocks) == [1]
    assert store.counters()["expired_blocks"] == 2
    clock.now += 3000
    store.tick()
    assert len(store) == 0 and [*block_files(scratch)] == []
    check_ledgers(store)
    store.close()


def test_a_budget_that_became_smaller_is_kept_from_the_next_write_on(scratch: Path) -> None:
    clock = Clock()
    store = open_store(scratch, size=12 * FILE, clock=clock)
    blocks = put_apart(store, clock, 12)
    store.close()
    store = open_store(scratch, size=5 * FILE, clock=clock)
    put_apart(store, clock, 1, seed=1)
    assert here(store, blocks) == [8, 9, 10, 11] and len([*block_files(scratch)]) == 5
    check_ledgers(store)
    store.close()


def test_a_budget_beyond_the_disk_is_said_once(
    scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        store = open_store(scratch, size=10**18)
    put(store, make_path(3))
    store.tick()
    store.close()
    said = [one.getMessage() for one in caplog.records if "the disk has room for" in one.message]
    assert len(said) == 1 and "of the 1000000000.0 GB of the budget" in said[0]


def test_files_removed_by_hand_are_missed_and_their_room_is_used(scratch: Path) -> None:
    clock = Clock()
    store = open_store(scratch, size=8 * FILE, clock=clock)
    blocks = put_apart(store, clock, 8)
    for path in [*block_files(scratch)]:
        path.unlink()
    assert read_bytes(store, blocks[0].block_id)[0] is Outcome.MISSING
    assert store.contains([blocks[0].block_id]) == 0
    more = put_apart(store, clock, 7, seed=1)
    assert all(is_served(store, block) for block in more)
    store.close()


# -- dealing --------------------------------------------------------------------------------------


@dataclass(eq=False)
class FakeDirectory:
    """As much of a directory as dealing looks at."""

    root: str
    budget: int
    up: bool = True

    def usable(self) -> bool:
        return self.up


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 2**32))
def test_each_gets_its_proportional_part(weights: list[int], seed: int) -> None:
    places = [FakeDirectory(f"{seed}/{n}", w * 10**12) for n, w in enumerate(weights)]
    dealer = Dealer(places)  # type: ignore[arg-type]
    count = 4000
    blocks = [(seed + n).to_bytes(16, "big") for n in range(count)]
    dealt = Counter(dealer.order(name)[0] for name in blocks)
    for place, weight in zip(places, weights, strict=True):  # type: ignore[assignment]
        part = weight / sum(weights)
        assert abs(dealt[place] - count * part) <= 6 * (count * part * (1 - part)) ** 0.5 + 1  # type: ignore[index]


def test_one_directory_less_moves_only_its_own_blocks() -> None:
    places = [FakeDirectory(str(n), 10**12) for n in range(4)]
    dealer = Dealer(places)  # type: ignore[arg-type]
    blocks = [n.to_bytes(16, "big") for n in range(500)]
    before = {name: dealer.order(name) for name in blocks}
    places[1].up = False
    for name in blocks:
        assert dealer.order(name) == [one for one in before[name] if one.usable()]


def test_blocks_of_one_prefix_lie_in_all_directories(tmp_path: Path) -> None:
    folders = [tmp_path / str(n) for n in range(3)]
    store = open_store(*folders)
    blocks = make_path(60)
    put(store, blocks)
    assert sorted(len([*block_files(folder)]) for folder in folders)[0] > 8
    assert all(is_served(store, block) for block in blocks)
    store.close()
