"""Reads and writes of whole slots behind the narrow interface, on threads over a real store."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.store.block_io import BlockIo
from sglang_hc.store.disk import threads
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    EIO,
    LAYOUT,
    Faults,
    FaultyBackend,
    data_of,
    make_path,
    only_in,
    open_store,
)
from support.remote import wait
from support.waiting import HANGS_S, in_time, until

SLOTS = 16


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
    wrote: list[str] = []
    faults.on_write = wrote.append
    io.write(1, make_path(1)[0], 0, time.monotonic())
    assert wait(io, 1)[0].outcome is Outcome.TIMED_OUT and not wrote, "it is not begun"


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
    assert [done[:2] for done in wait(io, 1)] == [(2, Outcome.OK)]
    assert io.contains([quick.block_id]) == 1 and io.contains([slow.block_id]) == 0
    go_on.set()
    assert [done[:2] for done in wait(io, 1)] == [(1, Outcome.OK)]


def test_writes_go_past_a_directory_whose_queue_is_full(
    tmp_path: Path, pool: HostPool, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "WRITE_QUEUE", 8)
    store = open_store(tmp_path / "a", tmp_path / "b", backend=FaultyBackend(faults))
    io = DiskThreads(store, pool, Counter())
    go_on = threading.Event()
    faults.on_write = only_in(f"{tmp_path}/b/", lambda path: go_on.wait(HANGS_S))
    well, bad = (directory.blocks for directory in store.directories)
    held = 4 + threads.WRITE_THREADS  # what waits for the other one, and what its threads write
    for ticket, block in enumerate(make_path(40)):
        io.write(ticket, block, ticket % SLOTS, in_time())
        until(partial(lambda begun: len(well) + held >= begun, ticket + 1))
    assert not bad
    store.maintenance[store.directories[0]].tick()
    go_on.set()
    assert {answer.outcome for answer in wait(io, 40)} == {Outcome.OK}
    io.close()
