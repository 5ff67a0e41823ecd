"""A remote store that is slow, raises or hangs: it is left alone, and nobody waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from sglang_hc.store import known_blocks as blocks
from sglang_hc.store.circuit_breaker import FAILURES_TO_OPEN
from sglang_hc.store.disk.format import check_block
from sglang_hc.store.jobs import Job, JobThread
from sglang_hc.store.known_blocks import KnownBlocks, Presence
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote import store as store_module
from sglang_hc.store.remote.store import storage_key
from support.clock import Clock
from support.disk_store import names_of
from support.remote import (
    FOREVER,
    MODEL,
    TARGET,
    FakeBackend,
    data_of,
    find,
    load,
    make_blocks,
    make_path,
    read_in_one_call,
    save,
    until,
    wait,
    write_in_one_call,
)
from support.waiting import HANGS_S


def test_a_store_that_keeps_raising_is_left_alone_for_a_while(
    io: KnownBlocks, store, pool, clock, caplog: pytest.LogCaptureFixture
) -> None:
    names = names_of(make_path(FAILURES_TO_OPEN + 1))
    store.raises = OSError("no route to host")
    with caplog.at_level(logging.WARNING):
        for name in names[:-1]:
            assert find(io, [name]) == 0
    assert "keeps failing; lookups and reads are off" in caplog.text
    assert io.counts["remote_pauses"] == 1 and io.levels() == {"remote_usable": 0}
    assert io.counts["remote_lookup_io_error"] == FAILURES_TO_OPEN
    calls = len(store.calls)
    assert io.contains(names) == 0 and not io.ask(names)
    assert load(io, names[0]) is Outcome.MISSING
    assert len(store.calls) == calls
    store.raises = None
    clock.now += 10
    assert find(io, names[-1:]) == 0
    assert io.levels() == {"remote_usable": 1}


def test_a_block_that_cannot_be_read_costs_no_other(
    large_calls: None, io: KnownBlocks, store, pool
) -> None:
    """One call asks for all of them, and raises."""
    path = make_path(FAILURES_TO_OPEN + 2)
    save(io, pool, path)
    bad = path[3].block_id
    store.unreadable = {storage_key(MODEL, bad)}
    pool.bytes[:] = 0
    read_in_one_call(io, store, path)
    lost = [done.ticket for done in wait(io, len(path) + 1) if done.outcome is not Outcome.OK]
    here = [np.array_equal(pool.slot(i), data_of(block.block_id)) for i, block in enumerate(path)]
    assert lost == [3] and here == [slot != 3 for slot in range(len(path))]
    assert store.calls.count("get") == 2 + len(path)
    assert io.levels() == {"remote_usable": 1} and "remote_pauses" not in io.counts


def test_a_block_that_cannot_be_saved_costs_no_other(io: KnownBlocks, store, pool) -> None:
    """One call stores all of them, and raises."""
    path = make_path(FAILURES_TO_OPEN + 2)
    names = names_of(path)
    store.unwritable = {storage_key(MODEL, names[3])}
    for slot, block in enumerate(path):
        pool.slot(slot)[:] = data_of(block.block_id)
    first = make_path(1, seed=1)
    write_in_one_call(io, store, first[0], path)
    lost = [done.ticket for done in wait(io, len(path) + 1) if done.outcome is not Outcome.OK]
    assert lost == [3]
    kept = {storage_key(MODEL, name) for name in [*names_of(first), *names]}
    assert set(store.values) == kept - store.unwritable
    assert store.calls.count("put") == 2 + len(path)
    assert io.levels() == {"remote_usable": 1} and "remote_pauses" not in io.counts


@pytest.mark.parametrize(("room", "lost"), [(0, 5), (2, 0)])
def test_what_a_full_store_refuses_is_asked_for_again_while_that_helps(
    store, pool, clock, room: int, lost: int
) -> None:
    """Mooncake evicts when it has refused some blocks of a call."""

    class Full(FakeBackend):
        def put(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
            some = room if len(self.store.calls) > 1 else 0
            done = super().put(keys[:some], frames[:some])
            return [*done, *[False] * (len(keys) - some)]

    io = make_blocks(store, pool, clock, backend=Full)
    first, *path = make_path(6)
    write_in_one_call(io, store, first, path)
    outcomes = [done.outcome for done in wait(io, 6) if done.ticket < 5]
    assert outcomes.count(Outcome.IO_ERROR) == lost
    assert store.calls.count("put") == 2 + (2 if lost else 3)
    io.close()


def test_what_was_given_up_is_not_asked_for_again(store, pool, clock) -> None:
    """It may be forgotten by then, and would come back."""
    given_up = threading.Event()

    class Full(FakeBackend):
        def put(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
            done = super().put(keys[:1], frames[:1])
            if len(keys) > 1:
                assert given_up.wait(HANGS_S)
            return [*done, *[False] * (len(keys) - 1)]

    io = make_blocks(store, pool, clock, backend=Full)
    first, *path = make_path(6)
    write_in_one_call(io, store, first, path, clock.now + 30)
    assert [done.ticket for done in wait(io, 1)] == [5]
    until(lambda: store.calls.count("put") == 2)
    clock.now += 31
    assert [done.outcome for done in wait(io, 5)] == [Outcome.TIMED_OUT] * 5
    given_up.set()
    io.close()
    kept = [storage_key(MODEL, name) for name in names_of([first, path[0]])]
    assert set(store.values) == set(kept)


def test_saves_that_keep_failing_do_not_stop_reads(io: KnownBlocks, store, pool) -> None:
    kept = make_path(1)
    save(io, pool, kept)
    store.raises = OSError("full")
    path = make_path(FAILURES_TO_OPEN, seed=1)
    assert save(io, pool, path) == [Outcome.IO_ERROR] * FAILURES_TO_OPEN
    store.raises = None
    assert save(io, pool, make_path(1, seed=2)) == [Outcome.DROPPED]
    assert load(io, kept[0].block_id) is Outcome.OK


def test_a_save_that_finds_the_queue_full_is_dropped(
    store, pool, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SAVE_QUEUE", 2)
    io = make_blocks(store, pool, clock)
    store.hang()
    for slot, block in enumerate(make_path(5)):
        io.write(slot, block, slot, FOREVER)
    assert [done.outcome for done in wait(io, 3)] == [Outcome.DROPPED] * 3
    store.open.set()
    assert [done.outcome for done in wait(io, 2)] == [Outcome.OK] * 2
    io.close()


def test_beyond_so_many_open_questions_a_block_counts_as_absent(
    store, pool, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LOOKUP_QUEUE", 2)
    io = make_blocks(store, pool, clock)
    store.hang()
    names = names_of(make_path(3))
    assert [io.ask([name]) for name in names] == [True, True, False]
    assert (io.counts["remote_lookups"], io.counts["remote_lookup_dropped"]) == (2, 1)
    store.open.set()
    until(lambda: not io.ask(names[:1]) and not io.ask(names[1:2]), io.poll)
    clock.now += Presence.ABSENT.value
    assert io.ask(names[2:]), "asked when there is room again"
    io.close()


def test_a_hung_store_is_not_asked_until_it_answers(
    io: KnownBlocks, store, pool, clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_path(1)
    save(io, pool, path)
    names = names_of(path)
    store.hang()
    io.read(1, names[0], TARGET, clock.now + 10)
    store.wait_for_call()
    assert io.poll() == []
    clock.now += 11
    with caplog.at_level(logging.WARNING):
        assert [done.outcome for done in io.poll()] == [Outcome.TIMED_OUT]
        assert "hangs" in caplog.text
        assert io.contains(names) == 0 and not io.ask(names)
        pool.slot(TARGET)[:] = 7  # it may belong to another block by now
        store.open.set()
        until(lambda: bool(io.levels()["remote_usable"]))
        io.poll()
    assert "answers again" in caplog.text
    assert (pool.slot(TARGET) == 7).all()
    clock.now += Presence.ABSENT.value
    assert find(io, names) == 1


def test_what_a_hung_store_would_be_asked_fails_at_once(
    io: KnownBlocks, store, pool, clock
) -> None:
    kept, new = make_path(2), make_path(2, seed=1)
    save(io, pool, kept)
    store.hang()
    io.write(1, new[0], 0, clock.now + 10)
    store.wait_for_call()
    store.hang()
    io.read(2, kept[0].block_id, TARGET, clock.now + 10)
    store.wait_for_call()
    clock.now += 11
    assert [done.outcome for done in io.poll()] == [Outcome.TIMED_OUT] * 2
    calls = len(store.calls)
    io.read(3, kept[1].block_id, TARGET, FOREVER)
    io.write(4, new[1], 1, FOREVER)
    assert io.ask(names_of(new))
    outcomes = [(done.ticket, done.outcome) for done in io.poll()]
    assert outcomes == [(3, Outcome.TIMED_OUT), (4, Outcome.DROPPED)]
    assert not io.ask(names_of(new)) and io.counts["remote_lookup_timed_out"] == 1
    assert len(store.calls) == calls
    store.open.set()
    until(lambda: bool(io.levels()["remote_usable"]))
    assert load(io, kept[1].block_id) is Outcome.OK


def test_jobs_of_one_call_are_late_together(clock: Clock) -> None:
    """None of them is there before the last one is, so a store that needs the time that all of
    them have is not said to hang."""
    entered, gate = threading.Semaphore(0), threading.Semaphore(0)

    def perform(batch: list[Job]) -> None:
        entered.release()
        assert gate.acquire(timeout=HANGS_S)
        for job in batch:
            job.complete(Outcome.OK)

    thread: JobThread[Job] = JobThread("test", perform, lambda: 2, clock=clock)
    alone, first, second = Job(1, FOREVER), Job(2, clock.now + 10), Job(3, clock.now + 20)
    thread.submit(alone)
    assert entered.acquire(timeout=HANGS_S)
    thread.submit(first)
    thread.submit(second)
    gate.release()
    assert entered.acquire(timeout=HANGS_S)  # one call does both
    clock.now += 19
    assert thread.take_done() == [alone] and not thread.stuck
    clock.now += 1
    assert thread.take_done() == [first, second] and thread.stuck
    assert first.outcome is second.outcome is Outcome.TIMED_OUT
    gate.release()
    assert thread.close(60)


def test_a_slot_is_read_before_the_store_is_called(io: KnownBlocks, store, pool, clock) -> None:
    """A save whose put hangs is answered; what its slot holds by then is not what is stored."""
    path = make_path(1)
    store.hang()
    pool.slot(0)[:] = data_of(path[0].block_id)
    io.write(1, path[0], 0, clock.now + 30)
    store.wait_for_call()
    clock.now += 31
    assert [done.outcome for done in io.poll()] == [Outcome.TIMED_OUT]
    pool.slot(0)[:] = 0
    store.open.set()
    until(lambda: bool(store.values))
    clock.now += 1000
    assert load(io, path[0].block_id) is Outcome.OK
    assert np.array_equal(pool.slot(TARGET), data_of(path[0].block_id))


def test_close_leaves_a_hung_thread_behind(
    store, pool, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CLOSE_S", 0.01)
    io = make_blocks(store, pool, clock)
    store.hang()
    io.ask(names_of(make_path(1)))
    store.wait_for_call()
    closing = threading.Thread(target=io.close)
    closing.start()
    closing.join(HANGS_S)
    assert not closing.is_alive()
    store.open.set()


def test_the_blocks_of_one_call_are_told_of_together(
    large_calls: None, io: KnownBlocks, store, pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever saw the first of them would take the others for unread."""
    path = make_path(3)
    save(io, pool, path)
    last, goes_on, proven = threading.Event(), threading.Event(), []

    def slowly(*args):
        proven.append(args)
        if len(proven) == 1 + len(path):
            last.set()
            assert goes_on.wait(HANGS_S)
        return check_block(*args)

    monkeypatch.setattr(store_module, "check_block", slowly)
    read_in_one_call(io, store, path)
    assert last.wait(HANGS_S)
    assert [done.ticket for done in io.poll()] == [len(path)], "of three, two are proven"
    goes_on.set()
    done: list = []
    until(lambda: done.extend(io.poll()) or len(done) == len(path))
    assert {one.outcome for one in done} == {Outcome.OK}


def test_late_blocks_of_a_call_that_raised_are_not_tried_one_by_one(
    large_calls: None, io: KnownBlocks, store, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store whose calls take long and raise then was asked for each of them, for nobody."""
    entered, gate = threading.Semaphore(0), threading.Semaphore(0)

    def slowly(what: str) -> None:
        store.calls.append(what)
        entered.release()
        assert gate.acquire(timeout=HANGS_S)
        raise OSError("injected")

    monkeypatch.setattr(store, "call", slowly)
    first, *others = make_path(4)
    io.read(3, first.block_id, 3, FOREVER)
    assert entered.acquire(timeout=HANGS_S)  # what is asked for meanwhile goes into one call
    for slot, block in enumerate(others):
        io.read(slot, block.block_id, slot, clock.now + 10)
    gate.release()
    assert entered.acquire(timeout=HANGS_S)
    clock.now += 11
    assert {done.outcome for done in wait(io, 4)} == {Outcome.IO_ERROR, Outcome.TIMED_OUT}
    gate.release()
    until(lambda: bool(io.levels()["remote_usable"]))
    io.close()
    assert store.calls.count("get") == 2
