"""A disk, or a thread, that never returns: whoever waits goes on, and what comes late does no harm.

The threads hang in the calls of the system until a test lets them go.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.store import executor as executor_module
from sglang_hc.store import lower_tier
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.disk import store as store_module
from sglang_hc.store.disk.threads import READ_THREADS, DiskThreads, Patience
from sglang_hc.store.executor import CopySlot, ThreadExecutor
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.scatter_queue import ScatterQueue
from support.disk_store import (
    LAYOUT,
    Faults,
    FaultyBackend,
    check_ledgers,
    data_of,
    make_path,
    open_store,
)
from support.host import host_tier, keep, path_of, tokens_of
from support.waiting import HANGS_S, in_time, until

SLOTS = 16
WRITING = ["on_create", "on_write", "on_rename"]
"""Calls of a write, in their order."""


class Hanging:
    """A disk whose calls hang from `hang` until `let_go`; no flush waits for long meanwhile."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.faults = Faults()
        self.inside = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def hang(self, *calls: str, where: str = "") -> None:
        """calls: names of hooks of `Faults`."""
        self._open.clear()
        self.inside.clear()
        self._patch.setattr(lower_tier, "DRAIN_S", 0.05)

        def wait(path: str) -> None:
            if where in path and not self._open.is_set():
                self.inside.set()
                assert self._open.wait(HANGS_S)

        for call in calls:
            setattr(self.faults, call, wait)

    def let_go(self) -> None:
        self._open.set()
        self._patch.setattr(lower_tier, "DRAIN_S", HANGS_S)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    disk = Hanging(monkeypatch)
    yield disk
    disk.let_go()


class World:
    """A host tier over disks that may hang."""

    def __init__(self, hanging: Hanging, *folders: Path) -> None:
        self.folders = folders
        self.hanging = hanging
        self.pool = HostPool(LAYOUT, SLOTS)
        self.host = host_tier(SLOTS)
        self.io = DiskThreads(
            open_store(*folders, backend=FaultyBackend(hanging.faults)), self.pool, Counter(),
            patience=Patience(HANGS_S, HANGS_S),
        )  # fmt: skip
        self.tier = LowerTier(KnownBlocks(self.io), self.host)

    def write_through(self, word: str) -> list:
        """The blocks of a path, with the bytes that follow from their identities, go to disk."""
        nodes = keep(self.host, tokens_of(word))
        for node in nodes:
            self.pool.slot(node.slot)[:] = data_of(node.block_id)
            self.tier.write_through(node)
        return nodes

    def saved(self, word: str) -> list:
        nodes = self.write_through(word)
        self.tier.drain()
        return nodes

    def fetch(self, word: str) -> None:
        path = path_of(word)
        assert self.tier.fetch(path, 0, len(word)) == len(word)

    def served(self, word: str) -> int:
        """Ready blocks of a path, each with its own bytes."""
        ready = [node for node in self.host.tree.match(path_of(word).prefix).nodes if node.ready]
        for node in ready:
            assert np.array_equal(self.pool.slot(node.slot), data_of(node.block_id))
        return len(ready)


@pytest.fixture
def world(hanging: Hanging, tmp_path: Path) -> Iterator[World]:
    world = World(hanging, tmp_path)
    yield world
    hanging.let_go()
    world.tier.close()


def test_a_read_that_hangs_holds_up_no_flush_and_is_published_by_none(
    world: World, hanging: Hanging
) -> None:
    """Its bytes come when its slot is nobody's: no new owner of the slot sees them."""
    world.saved("ab")
    world.host.clear()
    hanging.hang("on_read")
    world.fetch("ab")
    assert hanging.inside.wait(HANGS_S)
    world.tier.drain()
    world.tier.coming.give_up_all()
    world.host.clear()
    assert not world.tier.busy and not world.tier.coming
    assert world.host.withheld_slots == 2 and world.host.free_slots == SLOTS - 2
    world.host.check_integrity()
    others = keep(world.host, tokens_of("cdefghijklmnop"), ready=False)
    assert len(others) == SLOTS - 2, "all slots but those two"
    assert world.host.stage(0.0) is not None, "one of those is evicted rather"
    for node in others:
        world.pool.slot(node.slot)[:] = 7
    hanging.let_go()
    until(lambda: world.host.withheld_slots == 0, world.tier.poll)
    assert all((world.pool.slot(node.slot) == 7).all() for node in others if node.slot >= 0)
    assert world.served("ab") == 0, "nobody asked for it again"
    world.host.clear()
    world.fetch("ab")
    world.tier.drain()
    assert world.served("ab") == 2
    world.host.check_integrity()


@pytest.mark.parametrize("call", WRITING)
def test_a_write_that_hangs_holds_up_no_flush_and_keeps_its_bytes(
    world: World, hanging: Hanging, call: str
) -> None:
    """It takes its bytes from the slot when it goes on: they must be the block's still."""
    hanging.hang(call)
    first, second = world.write_through("ab")
    slots = first.slot, second.slot
    assert hanging.inside.wait(HANGS_S)
    world.tier.drain()
    world.host.clear()
    assert world.host.withheld_slots == 2
    assert world.tier.counters["disk_write_stuck"] == 2
    for node in keep(world.host, tokens_of("cdefghijklmnop"), ready=False):
        assert node.slot not in slots
        world.pool.slot(node.slot)[:] = 7
    hanging.let_go()
    until(lambda: world.host.withheld_slots == 0, world.tier.poll)
    world.host.clear()
    world.fetch("ab")
    world.tier.drain()
    assert world.served("ab") == 2


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("call", WRITING)
def test_what_hangs_while_the_disk_is_cleared_is_not_published_later(
    world: World, hanging: Hanging, call: str, given_up: bool
) -> None:
    """given_up: a flush has ended meanwhile, and nobody waits for the answers of the writes."""
    world.saved("z")
    hanging.hang(call)
    world.write_through("ab")
    assert hanging.inside.wait(HANGS_S)
    if given_up:
        world.tier.drain()
    else:
        world.write_through("cdefgh")  # these wait behind it
    ended: list[BlockDone] = []
    world.tier.erase(None, (), ended.extend)
    for _ in range(20):
        time.sleep(0.01)  # what does not wait is through by now
        world.tier.poll()
    assert not ended, "it waits for the writes"
    hanging.let_go()
    until(lambda: ended, world.tier.poll)
    assert [done.outcome for done in ended] == [Outcome.OK]
    until(lambda: world.host.withheld_slots == 0, world.tier.poll)
    assert world.io.levels()["disk_blocks"] == 0
    assert world.tier.find(path_of("ab").block_ids) == world.tier.find(path_of("z").block_ids) == 0
    world.io.close()
    store = open_store(*world.folders)
    assert store.block_ids() == []
    check_ledgers(store)
    store.close()


def test_a_clear_does_not_say_that_all_is_gone_while_a_write_hangs(
    world: World, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given up may be published yet, so the caller is to ask again."""
    monkeypatch.setattr(store_module, "WRITES_S", 0.05)
    world.saved("z")
    hanging.hang("on_write")
    world.write_through("ab")
    assert hanging.inside.wait(HANGS_S)
    world.tier.drain()
    ended: list[BlockDone] = []
    world.tier.erase(None, (), ended.extend)
    until(lambda: ended, world.tier.poll)
    assert [done.outcome for done in ended] == [Outcome.IO_ERROR]
    hanging.let_go()
    until(lambda: world.host.withheld_slots == 0, world.tier.poll)
    monkeypatch.undo()
    world.tier.erase(None, (), ended.extend)
    until(lambda: len(ended) == 2, world.tier.poll)
    assert ended[1].outcome is Outcome.OK and world.io.levels()["disk_blocks"] == 0


def test_a_stop_waits_for_no_disk(world: World, hanging: Hanging) -> None:
    world.saved("ab")
    world.host.clear()
    hanging.hang("on_read", "on_write")
    world.io.patience = Patience(close_s=0.05)
    world.fetch("ab")
    assert hanging.inside.wait(HANGS_S)
    closing = threading.Thread(target=world.tier.close, daemon=True)
    closing.start()
    closing.join(HANGS_S)
    assert not closing.is_alive()
    hanging.let_go()
    world.io.patience = Patience(HANGS_S, HANGS_S)


def test_a_directory_that_hangs_is_out_of_use_until_it_answers(
    hanging: Hanging, tmp_path: Path
) -> None:
    """The other directory takes all; what waited for the one that hangs is answered, so that its
    slots are free."""
    word = "abcdefghijkl"
    names = path_of(word).block_ids
    place = next(one for one in (tmp_path / str(n) for n in range(99)) if is_mixed(one, names))
    world = World(hanging, place / "a", place / "b")
    io = world.io
    world.saved(word)
    world.host.clear()
    bad = {name for name in names if place / "b" in file_of(place, name).parents}
    hanging.hang("on_read", where=f"{place}/b/")
    for ticket, name in enumerate(names):
        io.read(ticket, name, ticket, in_time())
    done: list[BlockDone] = []
    until(lambda: len(done) == len(names) - len(bad), lambda: done.extend(io.poll()))
    assert {one.outcome for one in done} == {Outcome.OK} and io.levels()["disk_directories"] == 2
    io.patience = Patience(0.0, HANGS_S)  # from now on whoever is inside hangs
    until(lambda: len(done) == len(names) - READ_THREADS, lambda: done.extend(io.poll()))
    assert io.levels()["disk_directories"] == 1
    assert Counter(one.outcome for one in done)[Outcome.IO_ERROR] == len(bad) - READ_THREADS
    assert {name for name in names if io.contains([name])} == {*names} - bad
    io.patience = Patience(HANGS_S, HANGS_S)
    until(lambda: io.levels()["disk_directories"] == 2, lambda: done.extend(io.poll()))
    io.patience = Patience(0.0, HANGS_S)
    until(lambda: io.levels()["disk_directories"] == 1, lambda: done.extend(io.poll()))
    other = make_path(4, seed=1)
    for slot, block in enumerate(other):
        world.pool.slot(12 + slot)[:] = data_of(block)
        io.write(100 + slot, block, 12 + slot, in_time())
    written: list[BlockDone] = []
    io.patience = Patience(HANGS_S, HANGS_S)
    until(lambda: len(written) == 4, lambda: written.extend(io.poll()))
    assert {one.outcome for one in written} == {Outcome.OK}
    assert not any(place / "b" in file_of(place, block.block_id).parents for block in other)
    assert io.counts["disk_directory_hangs"] == 2
    hanging.let_go()
    until(lambda: len(done) == len(names), lambda: done.extend(io.poll()))
    assert io.contains(names) == len(names)
    world.tier.close()


def is_mixed(folder: Path, names: Sequence[bytes]) -> bool:
    """Whether two directories here would get some blocks each: where they are decides it."""
    folder.mkdir()
    store = open_store(folder / "a", folder / "b")
    first = [store.order(name)[0] for name in names]
    store.close()
    return 2 < first.count(store.directories[1]) < len(names) - 2


def file_of(folder: Path, name: bytes) -> Path:
    """Of a block, in whichever directory."""
    (path,) = folder.rglob(name.hex())
    return path


def test_scatters_that_hang_hold_up_no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "DRAIN_S", 0.2, raising=False)
    pool, host = HostPool(LAYOUT, SLOTS), host_tier(SLOTS)
    inside, go_on = threading.Event(), threading.Event()
    perform = executor_module.perform

    def hang(*work: object) -> None:
        inside.set()
        assert go_on.wait(HANGS_S)
        perform(*work)  # type: ignore[arg-type]

    monkeypatch.setattr(executor_module, "perform", hang)
    executor = ThreadExecutor(pool, [])
    scatters = ScatterQueue(executor, host)
    source, target, free = (host.stage(0.0) for _ in range(3))
    assert source is not None and target is not None and free is not None
    pool.slot(source)[:] = 9
    copied = scatters.submit(CopySlot(source, target))
    assert inside.wait(HANGS_S)
    scatters.drain()
    assert copied.done and target in host.damaged_slots
    for slot in (source, target, free):
        host.unstage(slot)
    assert host.free_slots == SLOTS - 1 and host.withheld_slots == 1
    assert target not in {host.stage(0.0) for _ in range(SLOTS - 1)}
    host.check_integrity()
    closing = threading.Thread(target=scatters.close, daemon=True)
    closing.start()
    closing.join(HANGS_S)
    assert not closing.is_alive()
    go_on.set()
    until(lambda: host.withheld_slots == 0, scatters.poll)
    assert host.stage(0.0) == target, "it is in use again"
    host.check_integrity()
