"""The byte budget, the ledger and what is found under random workloads of several servers."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_hc.store.disk import DiskStore
from sglang_hc.store.disk.format import WHOLE
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting
from support.disk_store import (
    BUFFERED,
    FILE,
    MEMORY,
    block_files,
    bytes_at_a_moment,
    check_ledgers,
    data_of,
    file_bytes,
    is_served,
    make_path,
    open_store,
    put,
    read_bytes,
    remove,
)

PATHS = st.integers(0, 30)
SERVERS = st.integers(0, 2)
BUDGETS = st.sampled_from([12 * FILE, 20 * FILE + 100, 33 * FILE - 1])


class SeveralServers(RuleBasedStateMachine):
    """Two servers of one model and one that has another part of its blocks share two directories.
    Everything that can happen to them happens, one thing after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.disks = [self.folder / "a", self.folder / "b"]
        self.now = 1.7e9
        self.budgets = [20 * FILE] * 3
        self.stores = [self.start(number) for number in range(3)]
        self.shrunk = False
        """The largest budget became smaller, and nobody did upkeep since."""
        self.removed_by_hand = False

    def start(self, number: int) -> DiskStore:
        return open_store(
            *self.disks, size=self.budgets[number], backend=BUFFERED, clock=lambda: self.now,
            ttl_s=100_000, part=WHOLE if number < 2 else b"p" * 16,
        )  # fmt: skip

    @rule(which=SERVERS, seed=PATHS)
    def write(self, which: int, seed: int) -> None:
        good = {Outcome.OK, Outcome.DUPLICATE}
        if self.shrunk or len(set(self.budgets)) > 1:
            good.add(Outcome.NO_SPACE)  # one server has much less than there is
        assert set(put(self.stores[which], make_path(4, seed=seed))) <= good

    @rule(which=SERVERS, seed=PATHS)
    def read(self, which: int, seed: int) -> None:
        store = self.stores[which]
        for block in make_path(4, seed=seed):
            known = store.contains([block.block_id])
            served = is_served(store, block)
            assert known or not served
            assert served == bool(store.contains([block.block_id])), "what is gone is forgotten"

    @rule(which=SERVERS, seed=PATHS)
    def find(self, which: int, seed: int) -> None:
        store = self.stores[which]
        for block in make_path(4, seed=seed):
            there = any(Path(d.path(block.block_id)).exists() for d in store.shared_with)
            if not store.contains([block.block_id]):
                assert store.find(block.block_id) == there
                assert not there or is_served(store, block)

    @rule(which=SERVERS, seed=PATHS)
    def delete(self, which: int, seed: int) -> None:
        remove(self.stores[which], [block.block_id for block in make_path(4, seed=seed)][2:])

    @rule(which=SERVERS, seed=PATHS, wanted=st.booleans())
    def use(self, which: int, seed: int, wanted: bool) -> None:
        ids = [block.block_id for block in make_path(4, seed=seed)]
        self.stores[which].touch(ids)
        self.stores[which].expect(dict.fromkeys(ids, 1.0 if wanted else None))

    @rule(seconds=st.sampled_from([1, 60, 30_000]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        for store in self.stores:
            store.tick()
            assert not store.counters()["maintenance_errors"]
        self.shrunk = False

    @rule(which=SERVERS)
    def clear(self, which: int) -> None:
        store = self.stores[which]
        assert store.erase(None).complete and len(store) == 0
        assert not any(list(Path(d.folder.path).glob("?/?/*")) for d in store.directories)

    @rule(which=SERVERS)
    def forget(self, which: int) -> None:
        """Blocks without a label, which are all, of all servers."""
        assert self.stores[which].erase(Forgetting(None)).complete
        assert not any(list(block_files(disk)) for disk in self.disks)

    @rule(which=SERVERS, budget=BUDGETS, ends=st.booleans())
    def restart(self, which: int, budget: int, ends: bool) -> None:
        """With another budget. Or the server ends as one that is killed, in the middle of a write:
        what it was writing stays behind, and counts until somebody looks."""
        if ends:
            for directory in self.stores[which].directories:
                path = directory.membership.path_of(0, FILE)
                evictor = self.stores[which].maintenance[directory]._evictor
                file = evictor.make_file(path)
                if file is not None:
                    file.write([memoryview(data_of(bytes(16)))], 0)
                    file.close()
        self.stores[which].close()
        before, self.budgets[which] = max(self.budgets), budget
        self.shrunk |= max(self.budgets) < before
        self.stores[which] = self.start(which)

    @rule(count=st.integers(1, 9))
    def remove_by_hand(self, count: int) -> None:
        for disk in self.disks:
            for path in sorted(block_files(disk))[:count]:
                path.unlink()
        self.removed_by_hand = True

    @invariant()
    def no_byte_above_the_budget(self) -> None:
        most = max(file_bytes(disk) for disk in self.disks)
        assert most <= max(self.budgets) or self.shrunk

    @invariant()
    def the_ledger_is_never_too_small(self) -> None:
        for directory in self.stores[0].directories:
            with directory.ledger.held():
                used = directory.ledger.used
            real = file_bytes(Path(directory.root).parent)
            assert used is not None and used >= real
            assert self.removed_by_hand or used == real

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.folder)


TestSeveralServers = SeveralServers.TestCase
TestSeveralServers.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_threads_of_several_servers_keep_the_budget(scratch: Path) -> None:
    """At every moment, what is being written included."""
    budget, writers = 30 * FILE, 6
    stores = [open_store(scratch, size=budget) for _ in range(3)]
    for store in stores:
        store.tick()
    wrong: list[object] = []

    def work(number: int) -> None:
        store = stores[number % 3]
        for turn in range(12):
            for block in make_path(8, seed=turn * 2 + number % 2):
                wrong.extend({*put(store, [block])} - {Outcome.OK, Outcome.DUPLICATE})
                outcome, got = read_bytes(store, block.block_id)
                wrong.extend({outcome} - {Outcome.OK, Outcome.MISSING})
                if outcome is Outcome.OK and not np.array_equal(got, data_of(block)):
                    wrong.append(block)
            store.directories[0].find_others()
            remove(store, [make_path(1, seed=turn)[0].block_id])

    most = 0
    threads = [threading.Thread(target=work, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, bytes_at_a_moment(scratch))
    for thread in threads:
        thread.join()
    assert not wrong
    assert 20 * FILE < most <= budget
    assert file_bytes(scratch) <= budget
    check_ledgers(stores[0])
