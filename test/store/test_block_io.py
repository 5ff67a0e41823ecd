"""Reads and writes of whole slots behind the narrow interface, on threads over a real store."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.store.block_io import BlockDone, BlockIo
from sglang_hc.store.disk import threads
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from support.disk_store import EIO, LAYOUT, Faults, FaultyBackend, data_of, make_path, open_store
from support.waiting import HANGS_S, in_time, until

SLOTS = 16


def wait(io: BlockIo, count: int) -> list[BlockDone]:
    """The next `count` answers."""
    done: list[BlockDone] = []
    until(lambda: len(done) >= count, lambda: done.extend(io.poll()))
    return done


def wait_for(io: BlockIo, ticket: int) -> Outcome:
    """The next answer, which must be the ticket's."""
    (done,) = wait(io, 1)
    assert done.ticket == ticket
    return done.outcome


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def pool() -> HostPool:
    return HostPool(LAYOUT, SLOTS)


@pytest.fixture
def io(tmp_path: Path, pool: HostPool, faults: Faults) -> Iterator[DiskThreads]:
    io = DiskThreads(open_store(tmp_path, backend=FaultyBackend(faults)), pool, Counter())
    yield io
    io.close()


def save(io: BlockIo, pool: HostPool, count: int) -> list:
    blocks = make_path(count)
    for slot, block in enumerate(blocks):
        pool.slot(slot)[:] = data_of(block)
        io.write(slot, block, slot, in_time())
    assert {done.outcome for done in wait(io, count)} == {Outcome.OK}
    return blocks


def test_what_was_written_is_found_and_read(io: DiskThreads, pool: HostPool) -> None:
    blocks = save(io, pool, 4)
    names = [block.block_id for block in blocks]
    assert io.contains(names) == 4 and io.contains([bytes(16), *names]) == 0
    assert io.capacity >= 4
    before = time.monotonic()
    for index, name in enumerate(names):
        io.read(70 + index, name, 8 + index, in_time())
    done = wait(io, 4)
    assert sorted(answer[:3] for answer in done) == [
        (ticket, Outcome.OK, "disk") for ticket in range(70, 74)
    ]
    assert all(before <= answer.at <= time.monotonic() for answer in done)
    for index, block in enumerate(blocks):
        assert np.array_equal(pool.slot(8 + index), data_of(block))
    assert io.levels()["disk_blocks"] == 4


def test_a_second_write_says_that_it_is_there(io: DiskThreads, pool: HostPool) -> None:
    blocks = save(io, pool, 1)
    io.write(1, blocks[0], 0, in_time())
    assert wait(io, 1)[0].outcome is Outcome.DUPLICATE


def test_failures_are_answers(io: DiskThreads, pool: HostPool, faults: Faults) -> None:
    blocks = save(io, pool, 2)
    io.read(1, bytes(16), 8, in_time())
    assert wait(io, 1)[0].outcome is Outcome.MISSING
    io.read(1, blocks[0].block_id, 8, time.monotonic())
    assert wait(io, 1)[0].outcome is Outcome.TIMED_OUT
    faults.on_read = EIO
    io.read(1, blocks[0].block_id, 8, in_time())
    assert wait(io, 1)[0].outcome is Outcome.IO_ERROR
    faults.on_write = EIO
    io.write(1, make_path(1, seed=9)[0], 0, in_time())
    assert wait(io, 1)[0].outcome is Outcome.IO_ERROR


def test_a_write_that_comes_too_late_is_not_begun(
    io: DiskThreads, pool: HostPool, faults: Faults
) -> None:
    wrote = []
    faults.on_write = wrote.append
    io.write(1, make_path(1)[0], 0, time.monotonic())
    assert wait(io, 1)[0].outcome is Outcome.TIMED_OUT
    assert not wrote


def test_what_a_full_queue_has_no_place_for_is_dropped(
    io: DiskThreads, pool: HostPool, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "WRITE_QUEUE", 2)
    held = [True]

    def hold(path: str) -> None:
        while held[0]:
            time.sleep(0.001)

    faults.on_write = hold
    blocks = make_path(12)
    for slot, block in enumerate(blocks):
        io.write(slot, block, slot, in_time())
    dropped = io.poll()
    assert 0 < len(dropped) <= 10 and {done.outcome for done in dropped} == {Outcome.DROPPED}
    held[0] = False
    taken = wait(io, 12 - len(dropped))
    assert {done.outcome for done in taken} == {Outcome.OK}
    assert sorted(done.ticket for done in [*dropped, *taken]) == list(range(12))


def test_one_batch_is_written_while_another_is_held_up(
    io: DiskThreads, pool: HostPool, faults: Faults
) -> None:
    go_on = threading.Event()
    held = threading.Event()

    def hold_the_first(path: str) -> None:
        if not held.is_set():
            held.set()
            assert go_on.wait(HANGS_S)

    save(io, pool, 1)
    faults.on_write = hold_the_first
    slow, quick = make_path(2, seed=1)
    io.write(1, slow, 0, in_time())
    assert held.wait(HANGS_S)
    io.write(2, quick, 1, in_time())
    assert wait_for(io, 2) is Outcome.OK
    assert io.contains([quick.block_id]) == 1 and io.contains([slow.block_id]) == 0
    go_on.set()
    assert wait_for(io, 1) is Outcome.OK


def test_a_directory_that_hangs_holds_up_only_its_own_blocks(
    tmp_path: Path, pool: HostPool, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes go past it once its queue is full, reads and upkeep of the other one go on, and what
    it holds is answered when it is back."""
    monkeypatch.setattr(threads, "WRITE_QUEUE", 8)
    store = open_store(tmp_path / "a", tmp_path / "b", backend=FaultyBackend(faults))
    io = DiskThreads(store, pool, Counter())
    blocks = save(io, pool, 8)
    stuck = {n for n, block in enumerate(blocks) if block.block_id in store.directories[1].blocks}
    go_on = threading.Event()

    def hang(path: str) -> None:
        if path.startswith(str(tmp_path / "b")):
            assert go_on.wait(HANGS_S)

    faults.on_read = faults.on_write = hang
    for slot, block in enumerate(blocks):
        io.read(slot, block.block_id, 8 + slot, in_time())
    well = set(range(8)) - stuck
    assert {done.ticket for done in wait(io, len(well))} == well
    fresh = make_path(40, seed=1)
    done, left = [], deque(range(40))
    while left:
        number = left.popleft()
        io.write(100 + number, fresh[number], number % 4, in_time())
        for answer in io.poll():
            if answer.outcome is Outcome.DROPPED:  # there is room when others are through
                left.append(answer.ticket - 100)
                time.sleep(0.001)
            else:
                done.append(answer)
    held = 4 + threads.WRITE_THREADS  # what the other one has waiting, and what its threads write
    done += wait(io, max(0, 40 - held - len(done)))
    assert {answer.outcome for answer in done} == {Outcome.OK}
    assert len(store.directories[0].blocks) > 2
    store.maintenance[store.directories[0]].tick()
    go_on.set()
    done += wait(io, len(stuck) + 40 - len(done))
    assert sorted(answer.ticket for answer in done) == sorted([*stuck, *range(100, 140)])
    assert {answer.outcome for answer in done} == {Outcome.OK}
    io.close()


def test_clear_leaves_nothing_to_find(io: DiskThreads, pool: HostPool) -> None:
    blocks = save(io, pool, 3)
    io.erase(9, None, ())
    assert wait(io, 1)[0][1:3] == (Outcome.OK, "disk")
    assert io.contains([blocks[0].block_id]) == 0
    io.read(1, blocks[0].block_id, 8, in_time())
    assert wait(io, 1)[0].outcome is Outcome.MISSING
