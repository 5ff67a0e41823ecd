"""Several servers in one directory: each finds the others' blocks, and all keep one budget."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_hc.store.disk import DiskStore
from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.disk.sharing import NEW, SERVERS, living_servers
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import GOOD, Outcome
from support.disk_store import (
    FILE,
    LAYOUT,
    MEMORY,
    block_files,
    check_ledgers,
    data_of,
    is_served,
    make_path,
    open_store,
    put,
    read_bytes,
    remove,
)
from support.waiting import in_time, until

BUFFERED = DirectBackend(direct=False)


def look(*stores: DiskStore) -> None:
    """Each finds out who else is there."""
    for store in stores:
        for directory in store.directories:
            directory.membership.look()


@pytest.fixture
def pair(scratch: Path):
    """Two servers on one directory with room for twelve blocks."""
    stores = [open_store(scratch, size=12 * FILE) for _ in range(2)]
    look(*stores)
    yield stores
    for store in stores:
        store.close()


def test_what_one_stores_the_other_finds(pair: list[DiskStore]) -> None:
    one, other = pair
    blocks = make_path(5)
    put(one, blocks[:3])
    assert other.contains([blocks[0].block_id]) == 0
    assert [other.find(block.block_id) for block in blocks] == [True] * 3 + [False] * 2
    assert all(is_served(other, block) for block in blocks[:3])
    assert put(other, blocks) == [Outcome.DUPLICATE] * 3 + [Outcome.OK] * 2
    for store in pair:
        store.directories[0].find_others()
        assert store.contains([block.block_id for block in blocks]) == 5
        check_ledgers(store)


def test_a_request_asks_for_what_another_server_stored(pair: list[DiskStore]) -> None:
    """The scheduler does not wait: the answer comes from a thread, and is remembered."""
    pool = HostPool(LAYOUT, 4)
    io = DiskThreads(pair[1], pool, Counter())
    blocks = make_path(4)
    names = [block.block_id for block in blocks]
    put(pair[0], blocks[:3])
    assert io.contains(names) == 0
    assert io.ask(names), "soon"
    until(lambda: not io.ask(names), io.poll)
    assert io.contains(names) == 3
    put(pair[0], blocks[3:])
    assert not io.ask(names), "it was not there a moment ago"
    io.read(1, names[2], 0, in_time())
    done: list = []
    until(lambda: done, lambda: done.extend(io.poll()))
    assert done[0].outcome is Outcome.OK and np.array_equal(pool.slot(0), data_of(names[2]))


def test_who_is_alone_asks_nobody(scratch: Path) -> None:
    store = open_store(scratch)
    io = DiskThreads(store, HostPool(LAYOUT, 1), Counter())
    assert not io.ask([bytes(16)]) and not store.shared_with
    io.close()


def test_a_use_by_another_server_keeps_a_block(scratch: Path) -> None:
    now = 1e9
    stores = [open_store(scratch, size=6 * FILE, clock=lambda: now) for _ in range(2)]
    look(*stores)
    one, other = stores
    blocks = [make_path(1, seed=n)[0] for n in range(6)]
    for block in blocks:
        now += 60
        put(one, [block])
    now += 60
    assert other.find(blocks[0].block_id)
    other.touch([blocks[0].block_id])
    other.tick()
    put(one, [make_path(1, seed=7)[0]])
    assert is_served(one, blocks[0]) and not is_served(one, blocks[1])
    for store in stores:
        store.close()


def test_what_another_server_evicted_is_missing_and_known_to_be(pair: list[DiskStore]) -> None:
    one, other = pair
    old = make_path(6, seed=1)
    put(one, old)
    assert all(other.find(block.block_id) for block in old)
    put(other, make_path(12, seed=2))
    assert len([*block_files(Path(one.directories[0].root).parent)]) == 12
    served = [is_served(one, block) for block in old]
    assert not all(served)
    one.directories[0].find_others()
    assert [one.contains([block.block_id]) == 1 for block in old] == served


def test_who_ended_is_noticed_and_what_it_was_writing_is_removed(scratch: Path) -> None:
    """A lock ends with its process: here the files of one that was killed, without a lock."""
    store = open_store(scratch, size=12 * FILE)
    put(store, make_path(3))
    root = scratch / "sglang-hc"
    (root / SERVERS / "999999-deadbeef").touch()
    (root / NEW / f"999999-deadbeef-5-{FILE}").write_bytes(bytes(FILE))
    (root / NEW / "no server wrote this").write_bytes(b"x")
    directory = store.directories[0]
    with directory.ledger.held():
        assert directory.ledger.used is not None
        directory.ledger.used += FILE
    assert living_servers(str(root)) == [str(os.getpid())]
    look(store)
    assert directory.membership.alone and os.listdir(root / NEW) == []
    check_ledgers(store)
    store.close()
    assert living_servers(str(root)) == [] and os.listdir(root / SERVERS) == []


@pytest.mark.parametrize("text", ["", "x", "12", "-0000000000000000001", "9" * 40])
def test_an_account_that_is_no_number_is_counted_again(scratch: Path, text: str) -> None:
    store = open_store(scratch, size=12 * FILE)
    put(store, make_path(3))
    (scratch / "sglang-hc" / "lock").write_text(text)
    put(store, make_path(3, seed=1))
    check_ledgers(store)
    store.close()


def test_cleared_by_one_is_cleared_for_all(pair: list[DiskStore]) -> None:
    one, other = pair
    blocks = make_path(5)
    put(one, blocks)
    assert all(other.find(block.block_id) for block in blocks)
    other.forget_all()
    assert other.contains([blocks[0].block_id]) == 0 and not other.find(blocks[0].block_id)
    assert other.erase_all() == (5, True)
    assert read_bytes(one, blocks[0].block_id)[0] is Outcome.MISSING
    assert put(one, blocks[:1]) == [Outcome.OK] and other.find(blocks[0].block_id)
    check_ledgers(other)


class Sharing(RuleBasedStateMachine):
    """Servers come, store, read, remove, clear, die and are replaced; somebody removes files."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.now = 1e9
        self.stores: list[DiskStore] = []
        self.start()

    which = st.integers(0, 2)
    seeds = st.integers(0, 8)

    @precondition(lambda self: len(self.stores) < 3)
    @rule()
    def start(self) -> None:
        store = open_store(self.folder, size=10 * FILE, backend=BUFFERED, clock=lambda: self.now)
        self.stores.append(store)
        look(*self.stores)

    @precondition(lambda self: len(self.stores) > 1)
    @rule(which=which)
    def stop(self, which: int) -> None:
        self.stores.pop(which % len(self.stores)).close()

    @rule(which=which, seed=seeds, count=st.integers(1, 4))
    def store(self, which: int, seed: int, count: int) -> None:
        self.now += 20
        found = put(self.stores[which % len(self.stores)], make_path(count, seed=seed))
        assert set(found) <= set(GOOD)

    @rule(which=which, seed=seeds)
    def read(self, which: int, seed: int) -> None:
        store = self.stores[which % len(self.stores)]
        for block in make_path(4, seed=seed):
            store.find(block.block_id)
            is_served(store, block)
        store.touch([block.block_id for block in make_path(4, seed=seed)])

    @rule(which=which, seed=seeds)
    def remove(self, which: int, seed: int) -> None:
        names = [block.block_id for block in make_path(2, seed=seed)]
        remove(self.stores[which % len(self.stores)], names)

    @rule(which=which)
    def clear(self, which: int) -> None:
        store = self.stores[which % len(self.stores)]
        store.forget_all()
        assert store.erase_all().complete
        assert len(store) == 0 and [*block_files(self.folder)] == []

    @rule(seed=seeds)
    def rm(self, seed: int) -> None:
        for path in [*block_files(self.folder)][seed : seed + 2]:
            path.unlink()

    @rule(which=which)
    def tick(self, which: int) -> None:
        self.now += 15
        self.stores[which % len(self.stores)].tick()

    @invariant()
    def the_budget_is_kept(self) -> None:
        assert len([*block_files(self.folder)]) <= 10
        for store in self.stores:
            assert store.counters()["maintenance_errors"] == 0

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        again = open_store(self.folder, size=10 * FILE, backend=BUFFERED)
        check_ledgers(again)
        assert len(again) == len([*block_files(self.folder)])
        again.close()
        shutil.rmtree(self.folder)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestSharingLong(Sharing.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=60, deadline=None)
