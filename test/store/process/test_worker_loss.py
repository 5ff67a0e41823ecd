"""The I/O process is killed, hangs, or cannot be started: what is lost, and what goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.executor import Completion, CopyRows
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.process import supervisor as io_supervisor
from sglang_hc.store.process.opening import Io
from sglang_hc.store.process.supervisor import State
from sglang_hc.tools.disk.summary import user_of
from support import waiting
from support.disk_store import data_of, empty_slot, make_path, open_store, read_block
from support.io_process import (
    answers,
    check_read,
    names,
    pid_of,
    save,
    supervisor,
    until,
)
from support.waiting import in_time, is_over


def test_killed_it_comes_back_with_the_same_blocks(
    io: Io, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = make_path(6)
    save(io, blocks)
    first = pid_of(io)
    os.kill(first, signal.SIGSTOP)  # so that what follows is surely under way
    io.blocks.read(1, blocks[0].block_id, 32, in_time())
    io.blocks.write(2, make_path(1, seed=7)[0], 33, in_time())
    io.executor.submit(2, CopyRows(0, 1, 4))
    os.kill(first, signal.SIGKILL)
    assert {done.outcome for done in answers(io, 2)} == {Outcome.LOST}
    until(lambda: supervisor(io).state is State.UP, io)
    assert io.blocks.contains(names(blocks)) == 6
    assert pid_of(io) != first
    check_read(io, blocks)
    counts = io.counts
    assert (counts["io_losses"], counts["io_restarts"], counts["io_lost_operations"]) == (1, 1, 3)
    said = [record.getMessage() for record in caplog.records]
    assert sum("is gone (signal 9)" in line for line in said) == 1
    assert sum("is back" in line for line in said) == 1


def test_a_slot_is_not_given_back_while_the_process_may_be_alive(
    io: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was told to die may still write to a slot: no answer before it is dead."""
    os.kill(pid_of(io), signal.SIGSTOP)
    io.blocks.read(1, bytes(16), 32, in_time())
    with monkeypatch.context() as patch:
        patch.setattr(io_supervisor.IoLink, "exit_code", None)
        supervisor(io)._end("for the test")
        for _ in range(100):
            assert io.blocks.poll() == []
            time.sleep(0.001)
    assert answers(io, 1)[0].outcome is Outcome.LOST


def later(io: Io, seconds: float) -> None:
    """From now on it is so much later to whoever watches the process."""
    supervisor(io)._clock = lambda: time.monotonic() + seconds


def test_a_process_that_hangs_is_replaced(io: Io) -> None:
    first = pid_of(io)
    os.kill(first, signal.SIGSTOP)
    io.blocks.read(1, bytes(16), 32, in_time())
    later(io, io_supervisor.HANG_S)
    assert answers(io, 1)[0].outcome is Outcome.LOST
    until(lambda: supervisor(io).state is State.UP, io)
    assert pid_of(io) != first


def test_an_operation_far_behind_its_deadline_counts_as_a_hang(
    io: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_supervisor, "OVERDUE_S", 0.5)
    first = pid_of(io)
    os.kill(first, signal.SIGSTOP)
    io.blocks.read(1, bytes(16), 32, time.monotonic())
    later(io, 0.5)
    until(lambda: io.counts["io_losses"] == 1, io)


def test_scattering_goes_on_without_the_process(io: Io, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor(io), "_backoff", 1000.0)
    os.kill(pid_of(io), signal.SIGKILL)
    until(lambda: supervisor(io).state is State.DOWN, io)
    io.memory.pool.hidden[0] = 5
    io.executor.submit(1, CopyRows(0, 1, BLOCK_TOKENS))
    assert [done.ok for done in io.executor.drain()] == [True]
    assert (io.memory.pool.hidden[1] == 5).all()
    assert not io.blocks.write(1, make_path(1)[0], 0, in_time())
    io.blocks.read(1, bytes(16), 2, in_time())
    assert io.blocks.poll()[0].outcome is Outcome.LOST


def test_operations_stay_in_order_across_losses(io: Io) -> None:
    """Each copy takes what the last one left. When one is lost, those after it run all the same,
    so every slot holds what its last successful operation says."""
    rng = random.Random(5)
    pool = io.memory.pool
    pool.hidden[0] = 1
    submitted: dict[int, CopyRows] = {}
    done: list[Completion] = []
    kills = 0

    def is_back() -> bool:
        done.extend(io.executor.poll())
        return io.counts["io_losses"] >= kills and supervisor(io).state is State.UP

    for step in range(400):
        if step in (50, 180, 300):
            waiting.until(is_back)
            os.kill(pid_of(io), signal.SIGKILL)
            kills += 1
        if step == 51:
            with contextlib.suppress(TypeError):  # there is none just now
                os.kill(supervisor(io).pid, signal.SIGKILL)
        operation = CopyRows(rng.randrange(8), rng.randrange(8), BLOCK_TOKENS)
        submitted[step] = operation
        io.executor.submit(step, operation)
        done += io.executor.poll()
        if step % 50 == 49:
            time.sleep(0.2)
    done += io.executor.drain()
    assert [one.ticket for one in done] == list(submitted), "in ticket order, each once"
    assert io.counts["io_losses"] >= 3


def test_back_off_grows_while_it_cannot_start(
    tmp_path: Path, io: Io, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory turns into something that cannot be used, and later back."""
    blocks = make_path(3)
    save(io, blocks)
    (tmp_path / "d").rename(tmp_path / "away")
    (tmp_path / "d").write_text("not a directory")
    os.kill(pid_of(io), signal.SIGKILL)
    until(lambda: io.counts["io_losses"] >= 3, io)
    assert "cannot be used" in caplog.text
    assert supervisor(io)._backoff >= 4 * io_supervisor.FIRST_BACKOFF_S
    (tmp_path / "d").unlink()
    (tmp_path / "away").rename(tmp_path / "d")
    until(lambda: io.blocks.contains(names(blocks)) == 3, io)
    check_read(io, blocks)


def test_a_process_that_cannot_be_started_is_tried_again(
    io: Io, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = io_supervisor.IoLink
    attempts = []

    def fails_once(*args: object) -> io_supervisor.IoLink:
        attempts.append(args)
        if len(attempts) == 1:
            raise OSError("no memory")
        return real(*args)

    monkeypatch.setattr(io_supervisor, "IoLink", fails_once)
    os.kill(pid_of(io), signal.SIGKILL)
    until(lambda: io.counts["io_restarts"] == 1, io)
    assert "cannot be started: no memory" in caplog.text and len(attempts) == 2


ORPHAN = """
import os
from support.disk_store import data_of, make_path
from support.io_process import MEMORY, disk_spec
from support.waiting import in_time
from sglang_hc.store.process.opening import open_io
from pathlib import Path
io = open_io("process", MEMORY, disk_spec(Path({folder!r})))
for slot, block in enumerate(make_path(20)):
    io.memory.pool.slot(slot)[:] = data_of(block)
    io.blocks.write(slot, block, slot, in_time())
print(io.executor.supervisor.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    code = ORPHAN.format(folder=str(tmp_path / "d"))
    answer = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert answer.returncode == -signal.SIGKILL, answer.stderr
    pid = int(answer.stdout)
    waiting.until(lambda: is_over(pid))
    store = open_store(tmp_path / "d")  # the lock is free
    for block in make_path(20):
        if store.contains([block.block_id]):
            into = empty_slot()
            assert read_block(store, block.block_id, into).value == "ok"
            assert np.array_equal(into, data_of(block))
    store.close()


START = """
from sglang_hc.store.process.opening import open_io
from support.io_process import MEMORY, disk_spec
from pathlib import Path

open_io("process", MEMORY, disk_spec(Path({folder!r})))
"""


def test_it_does_not_outlive_its_parent_while_it_starts(tmp_path: Path) -> None:
    """A server was killed while its I/O process rebuilt an index: the next one was refused the
    directory for as long as that took. Here the process reads an index that never comes."""
    open_store(tmp_path).close()
    index = tmp_path / "sglang-hc" / "index.sqlite"
    index.unlink()
    os.mkfifo(index)
    lock = tmp_path / "sglang-hc" / "lock"
    lock.write_text("")
    parent = subprocess.Popen(
        [sys.executable, "-c", START.format(folder=str(tmp_path))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    waiting.until(lambda: lock.read_text().isdigit())
    parent.kill()
    parent.wait()
    waiting.until(lambda: is_over(int(lock.read_text())) and user_of(str(lock.parent)) is None)
    index.unlink()
    open_store(tmp_path).close()
