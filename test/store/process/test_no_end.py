"""An I/O process that was killed and is not reaped: a call of the system does not come back.

Such a process cannot be made here, so the tests lie about its end: its link says that it has not
ended. Also processes that begin with a disk that says nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.disk import DirectoryError
from sglang_hc.store.executor import Completion, CopyRows
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.process import clients
from sglang_hc.store.process import supervisor as io_supervisor
from sglang_hc.store.process.link import IoLink
from sglang_hc.store.process.messages import Setup
from sglang_hc.store.process.opening import Io, open_io
from sglang_hc.store.process.supervisor import IoSupervisor, State
from support.clock import Clock
from support.disk_store import make_path, open_store
from support.io_process import MEMORY, check_read, disk_spec, pid_of, save, supervisor, until
from support.waiting import HANGS_S, in_time


@pytest.fixture
def unreaped(io: Io, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The process there is never ends, as long as this list holds True."""
    never = [True]
    (pid, code) = pid_of(io), IoLink.exit_code.fget
    assert code is not None
    ends = property(lambda link: None if link.pid == pid and never[0] else code(link))
    monkeypatch.setattr(IoLink, "exit_code", ends)
    monkeypatch.setattr(io_supervisor, "REAP_S", 0.1, raising=False)
    return never


def end(io: Io) -> None:
    """Its end is noticed: it hung."""
    supervisor(io)._end("it said nothing")


def test_scatters_and_writes_go_on_and_only_slots_of_reads_stay_in_use(
    io: Io, unreaped: list[bool]
) -> None:
    blocks = make_path(3)
    save(io, blocks)
    os.kill(pid_of(io), signal.SIGSTOP)
    io.blocks.read(1, blocks[0].block_id, 32, in_time())
    io.blocks.write(2, make_path(1, seed=7)[0], 33, in_time())
    io.executor.submit(3, CopyRows(0, 1, 4))
    supervisor(io).flush()
    end(io)
    done = io.executor.drain()
    assert done == [Completion(3, False)]
    answered: list = []
    until(lambda: answered.extend(io.blocks.poll()) or answered, io)
    assert [(one.ticket, one.outcome) for one in answered] == [(2, Outcome.LOST)]
    io.memory.pool.slot(0)[:] = 9
    for ticket in range(10, 500):
        io.executor.submit(ticket, CopyRows(0, 1, BLOCK_TOKENS))
    assert io.executor.drain() == [Completion(ticket, True) for ticket in range(10, 500)]
    assert (io.memory.pool.hidden[1] == 9).all() and not io.executor._held
    assert supervisor(io).state is State.ENDING and not io.blocks.poll()
    assert io.blocks.contains([blocks[0].block_id]) == 0 and io.executor.levels() == {"io_up": 0}
    unreaped[0] = False
    until(lambda: answered.extend(io.blocks.poll()) or len(answered) == 2, io)
    assert (answered[1].ticket, answered[1].outcome) == (1, Outcome.LOST)
    until(lambda: supervisor(io).state is State.UP, io)
    check_read(io, blocks)
    assert io.counts["io_losses"] == 1


def test_a_stop_leaves_it_behind(io: Io, unreaped: list[bool]) -> None:
    end(io)
    closing = threading.Thread(target=io.blocks.close, daemon=True)
    closing.start()
    closing.join(HANGS_S)
    assert not closing.is_alive()


def test_a_stop_kills_one_that_does_not_finish_and_leaves_it_behind(
    io: Io, unreaped: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_supervisor, "CLOSE_S", 0.1)
    os.kill(pid_of(io), signal.SIGSTOP)
    closing = threading.Thread(target=io.blocks.close, daemon=True)
    closing.start()
    closing.join(HANGS_S)
    assert not closing.is_alive()


def test_a_drain_of_one_that_stands_still_ends(io: Io, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "DRAIN_S", 0.1, raising=False)
    os.kill(pid_of(io), signal.SIGSTOP)
    io.executor.submit(1, CopyRows(0, 1, 4))
    done: list = []
    draining = threading.Thread(target=lambda: done.append(io.executor.drain()), daemon=True)
    draining.start()
    draining.join(HANGS_S)
    assert done == [[]]
    os.kill(pid_of(io), signal.SIGCONT)
    until(lambda: done.extend(io.executor.poll()) or len(done) > 1, io)
    assert done[1] == Completion(1, True)


def test_a_server_starts_without_waiting_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process reads an index that never comes."""
    monkeypatch.setattr(io_supervisor, "START_S", 3.0)
    open_store(tmp_path).close()
    index = tmp_path / "sglang-hc" / "index.sqlite"
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(DirectoryError, match=r"--hc-disk: a directory does not answer.*leave it"):
        open_io("process", MEMORY, disk_spec(tmp_path))


class Starting:
    """A link whose process opens a large store."""

    pid, exit_code, progress = 1, None, 0

    def __init__(self, setup: Setup, descriptor: int) -> None:
        self.killed = False

    def receive(self) -> None:
        return None

    def kill(self) -> None:
        self.killed = True


def test_a_rebuild_may_take_long_while_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an index of millions of blocks: it was killed after 600 s and began from nothing, for
    ever."""
    monkeypatch.setattr(io_supervisor, "IoLink", Starting)
    clock = Clock(0.0)
    supervised = IoSupervisor(Setup(MEMORY, None), 0, Counter(), clock)
    clock.pass_time(io_supervisor.LONGEST_BACKOFF_S)
    supervised.poll()
    while supervised._link is None:
        supervised.poll()
        time.sleep(0.001)
    link = supervised._link
    assert isinstance(link, Starting)
    for _ in range(20):
        clock.pass_time(io_supervisor.START_S - 1)
        link.progress += 4096
        supervised.poll()
        assert supervised.state is State.STARTING and not link.killed
    clock.pass_time(io_supervisor.START_S - 1)
    supervised.poll()
    assert not link.killed
    clock.pass_time(1)
    supervised.poll()
    assert link.killed and supervised.state is State.ENDING


def test_what_a_process_reads_is_its_progress(io: Io) -> None:
    blocks = make_path(2)
    save(io, blocks)
    link = supervisor(io)._link
    assert link is not None
    before = link.progress
    check_read(io, blocks)
    assert link.progress - before >= 2 * MEMORY.layout.slot_bytes
