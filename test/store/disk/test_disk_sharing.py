"""Several servers in one directory: who is there, what others stored, and what the dead left.

A hook of the backend does what another thread or server does at the worst moment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.circuit_breaker import FAILURES_TO_OPEN
from sglang_hc.store.disk import DirectoryError, DiskStore, sharing
from sglang_hc.store.disk.maintenance import FIND_SHARE, LOOK_S
from sglang_hc.store.disk.sharing import NEW, SERVERS, Ledger, living_servers
from sglang_hc.store.disk.threads import PATIENCE, WRITE_THREADS, DiskThreads, Patience
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from support.clock import Clock
from support.disk_store import (
    FILE,
    LAYOUT,
    Faults,
    FaultyBackend,
    check_ledgers,
    file_bytes,
    is_served,
    make_path,
    open_store,
    put,
    remove,
)
from support.waiting import HANGS_S, in_time, until

BLOCKS = make_path(6)
NAMES = [block.block_id for block in BLOCKS]


@pytest.fixture
def other(scratch: Path) -> DiskStore:
    return open_store(scratch)


@pytest.fixture
def one(scratch: Path, faults: Faults, other: DiskStore) -> Iterator[DiskStore]:
    """A server that knows the other one; the faults are its own."""
    one = open_store(scratch, backend=FaultyBackend(faults))
    one.tick()
    other.tick()
    yield one
    check_ledgers(one)


def once(action: Callable[[], object]) -> Callable[[str], None]:
    """A hook that does something the first time it is called."""
    done: list[str] = []

    def hook(path: str) -> None:
        if not done:
            done.append(path)
            action()

    return hook


def test_each_finds_what_the_other_stored(one: DiskStore, other: DiskStore) -> None:
    assert one.take_changes() == []
    put(other, BLOCKS)
    assert one.contains(NAMES) == 0 and not one.find(bytes(16))
    assert one.find(NAMES[0]) and one.contains(NAMES) == 1
    assert one.take_changes() == NAMES[:1], "whoever mirrors it is told"
    one.directories[0].find_others()
    assert one.contains(NAMES) == 6 and sorted(one.take_changes()) == sorted(NAMES[1:])
    assert all(is_served(one, block) for block in BLOCKS)
    assert put(one, BLOCKS) == [Outcome.DUPLICATE] * 6
    (late,) = make_path(1, seed=1)
    put(other, [late])
    assert not one.contains([late.block_id])
    assert put(one, [late]) == [Outcome.DUPLICATE], "a write looks"
    remove(one, NAMES[3:])
    assert other.contains(NAMES) == 6
    other.directories[0].find_others()
    assert other.contains(NAMES) == 3


def test_who_is_alone_asks_nobody(scratch: Path) -> None:
    store = open_store(scratch)
    put(store, BLOCKS)
    store.close()
    faults, asked = Faults(), []
    store = open_store(scratch, backend=FaultyBackend(faults))
    faults.on_stat = asked.append
    assert not store.find(bytes(16)) and not store.shared_with and not asked


def test_two_servers_write_a_block_at_once(
    one: DiskStore, other: DiskStore, faults: Faults, scratch: Path
) -> None:
    """One file takes the place of the other, and is counted once."""
    faults.on_write = once(lambda: put(other, BLOCKS[:1]))
    assert put(one, BLOCKS[:1]) == [Outcome.OK]
    assert file_bytes(scratch) == FILE
    check_ledgers(one)
    assert is_served(one, BLOCKS[0]) and is_served(other, BLOCKS[0])


def test_the_other_evicts_while_a_block_is_read(
    one: DiskStore, other: DiskStore, faults: Faults
) -> None:
    put(one, BLOCKS)
    other.directories[0].find_others()
    faults.on_read = once(lambda: remove(other, NAMES[:1]))
    assert is_served(one, BLOCKS[0]), "an open file stays"
    faults.on_open = once(lambda: remove(other, NAMES[1:2]))
    assert not is_served(one, BLOCKS[1])
    assert one.contains(NAMES[1:]) == 0 and one.contains(NAMES[2:]) == 4
    assert one.counters()["directory_pauses"] == 0


# -- what comes in between ------------------------------------------------------------------------


def test_what_is_erased_while_the_disk_is_asked_is_not_found(
    one: DiskStore, other: DiskStore, faults: Faults
) -> None:
    put(other, BLOCKS)

    class Late(FaultyBackend):
        def last_use(self, path: str) -> int:
            used = super().last_use(path)
            assert one.erase(None).complete
            return used

    one.directories[0].backend = Late(faults)
    assert not one.find(NAMES[0])
    one.directories[0].backend = FaultyBackend(faults)
    assert one.contains(NAMES) == 0 and len(one) == 0


def test_a_use_that_is_noted_does_not_bring_a_removed_block_back(
    one: DiskStore, faults: Faults
) -> None:
    put(one, BLOCKS)
    one.directories[0].clock = Clock(4e9)
    one.touch(NAMES)
    faults.on_note = once(lambda: remove(one, NAMES))
    one.directories[0].note_touches()
    assert one.contains(NAMES) == 0 and len(one) == 0


def test_learning_uses_does_not_bring_a_block_back(scratch: Path, faults: Faults) -> None:
    store = open_store(scratch)
    put(store, BLOCKS)
    store.close()
    clock = Clock(1e9)  # all uses are to come: each is put right on the disk
    store = open_store(scratch, backend=FaultyBackend(faults), clock=clock)
    faults.on_note = once(lambda: remove(store, NAMES[:3]))
    store.directories[0].learn_uses()
    assert sorted(store.block_ids()) == sorted(NAMES[3:])
    store.close()
    store = open_store(scratch, backend=FaultyBackend(faults), clock=lambda: 5e8)
    store.directories[0].learn_uses()
    assert sorted(store.block_ids()) == sorted(NAMES[3:])


# -- who is there ---------------------------------------------------------------------------------


def test_who_is_there_is_found_out_now_and_then(scratch: Path) -> None:
    clock = Clock(1e9)
    one = open_store(scratch, clock=clock)
    one.tick()
    other = open_store(scratch, clock=clock)
    assert not other.directories[0].membership.alone and one.directories[0].membership.alone
    assert living_servers(one.directories[0].root) == [str(os.getpid())]
    put(other, BLOCKS)
    clock.now += LOOK_S - 1
    one.tick()
    assert one.contains(NAMES) == 0
    clock.now += 1
    one.tick()
    assert one.contains(NAMES) == 6 and one.shared_with == list(one.directories)
    last = make_path(2, seed=1)
    put(other, last)
    remove(other, NAMES[3:])
    other.close()
    clock.now += LOOK_S
    one.tick()
    assert not one.shared_with
    assert sorted(one.block_ids()) == sorted(NAMES[:3] + [block.block_id for block in last])
    one.close()
    assert living_servers(one.directories[0].root) == []


def test_what_a_server_stored_that_left_is_found_when_a_look_is_due(scratch: Path) -> None:
    """The look at its blocks was put off, as the one before had taken long; then nobody was there
    any more, and it was never made."""
    clock, faults = Clock(1e9), Faults()
    one = open_store(scratch, clock=clock, backend=FaultyBackend(faults))
    other = open_store(scratch, clock=clock)
    put(other, BLOCKS[:1])
    faults.on_stat = once(lambda: clock.pass_time(1.0))
    one.tick()
    assert one.contains(NAMES) == 1
    put(other, BLOCKS)
    other.close()
    clock.pass_time(LOOK_S)
    one.tick()
    assert not one.shared_with and one.contains(NAMES) == 1
    clock.pass_time(1.0 / FIND_SHARE)
    one.tick()
    assert one.contains(NAMES) == 6


def test_what_a_dead_server_was_writing_is_removed(scratch: Path) -> None:
    store = open_store(scratch, size=10 * FILE)
    root = scratch / "sglang-hc"
    dead = f"{os.getpid()}-0123abcd"
    (root / SERVERS / dead).touch()
    (root / NEW / f"{dead}-7-{FILE}").write_bytes(b"half")
    (root / NEW / "by hand").touch()
    (root / NEW / "folder").mkdir()
    (root / SERVERS / "folder").mkdir()
    mine = store.directories[0].membership.path_of(1, FILE)
    Path(mine).touch()
    with store.directories[0].ledger.held():
        store.directories[0].ledger.used = 2 * FILE
    store.tick()
    assert sorted(os.listdir(root / NEW)) == sorted(["folder", os.path.basename(mine)])
    assert not (root / SERVERS / dead).exists()
    assert store.directories[0].membership.alone
    with store.directories[0].ledger.held():
        assert store.directories[0].ledger.used == FILE, "what is being written counts"
    Path(mine).unlink()
    (root / NEW / "folder").rmdir()


def test_a_ledger_that_says_nothing_is_counted_anew(scratch: Path) -> None:
    store = open_store(scratch, size=10 * FILE)
    put(store, BLOCKS)
    for text in (b"", b"nonsense", b"9" * 19, b"9" * 21, b"-0000000000000000001", b"\xff" * 20):
        (scratch / "sglang-hc" / "lock").write_bytes(text)
        (extra,) = make_path(1, seed=9)
        assert put(store, [extra]) == [Outcome.OK]
        check_ledgers(store)
        remove(store, [extra.block_id])


# -- a server that stands still ------------------------------------------------------------------

STOPPED = """
import os, signal, sys
from pathlib import Path
from support.disk_store import Faults, FaultyBackend, make_path, open_store, put

def stop(path):
    faults.on_create = lambda path: None
    os.kill(os.getpid(), signal.SIGSTOP)

faults = Faults(on_create=stop)  # a file is made while the lock is held
store = open_store(Path(sys.argv[1]), backend=FaultyBackend(faults))
(outcome,) = put(store, make_path(1))
print(outcome.value, flush=True)
store.close()
"""


def stopped_server(folder: Path) -> subprocess.Popen[str]:
    """A server that stands still while it holds the directory's lock."""
    server = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    _, status = os.waitpid(server.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return server


def test_a_server_that_is_stopped_with_the_lock_holds_up_nobody_for_ever(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others read on and drop what they write, which is counted and no failure of the disk; who
    starts is told why it cannot; and the stopped one goes on where it was."""
    one = open_store(scratch)
    threads = DiskThreads(one, HostPool(LAYOUT, 2), Counter())
    put(one, BLOCKS[1:2])
    server = stopped_server(scratch)
    try:
        monkeypatch.setattr(sharing, "LOCK_S", 0.1)
        threads.write(1, BLOCKS[2], 0, in_time())
        done: list[BlockDone] = []
        until(lambda: done, lambda: done.extend(threads.poll()))
        assert [answer.outcome for answer in done] == [Outcome.DROPPED]
        assert is_served(one, BLOCKS[1])
        one.tick()
        assert one.counters() == {"maintenance_errors": 1, "lock_timeouts": 2}
        for _ in range(FAILURES_TO_OPEN):
            one.directories[0].io_failed(sharing.LockTimeout())
        assert one.in_use() == [*one.directories], "it is busy; its disk works"
        with pytest.raises(DirectoryError, match=r"does not give its lock back\); end the"):
            open_store(scratch)
    finally:
        server.send_signal(signal.SIGCONT)
    said, _ = server.communicate(timeout=HANGS_S)
    assert said == "ok\n" and one.directories[0].find(BLOCKS[0].block_id)
    assert put(one, BLOCKS[2:3]) == [Outcome.OK]
    check_ledgers(one)
    threads.close()


def test_a_write_waits_for_one_lock_and_not_for_one_of_each_directory(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LOCK_S", 0.1)
    store = open_store(scratch / "a", scratch / "b")
    others = [Ledger(directory.root) for directory in store.directories]
    with others[0].held(), others[1].held():
        assert put(store, BLOCKS[:1]) == [Outcome.DROPPED]
    assert store.counters()["lock_timeouts"] == 1
    assert put(store, BLOCKS[:1]) == [Outcome.OK]
    for ledger in others:
        ledger.close()


def test_writes_that_wait_for_the_lock_do_not_look_like_a_disk_that_hangs(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waited for the first one and then as long again, and reads of the directory
    went out of use with both."""
    assert PATIENCE.silent_s > 2 * sharing.LOCK_S
    limit = 1.0
    monkeypatch.setattr(sharing, "LOCK_S", limit)
    one = open_store(scratch)
    (directory,) = one.directories
    threads = DiskThreads(one, HostPool(LAYOUT, 4), Counter(), Patience(1.9 * limit, HANGS_S))
    put(one, BLOCKS[:1])
    ledger = Ledger(directory.root)  # what another process has of it
    done: list[BlockDone] = []
    with ledger.held():
        for ticket in range(2 * WRITE_THREADS):
            threads.write(ticket, BLOCKS[1 + ticket], ticket % 4, in_time())
        until(lambda: len(done) == WRITE_THREADS, lambda: done.extend(threads.poll()))
        assert threads.counts["disk_directory_hangs"] == 0 and not directory.hangs
        threads.read(99, NAMES[0], 0, in_time())
        until(lambda: len(done) == 2 * WRITE_THREADS + 1, lambda: done.extend(threads.poll()))
        assert threads.counts["disk_directory_hangs"] == 0
    ended = {answer.ticket: answer.outcome for answer in done}
    assert ended.pop(99) is Outcome.OK and set(ended.values()) == {Outcome.DROPPED}
    ledger.close()
    threads.close()
