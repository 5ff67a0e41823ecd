"""The I/O process: the same answers as threads give, and what happens when it is lost."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.disk import Block, DirectoryError, DirectorySpec
from sglang_hc.store.executor import Completion, CopyRows, FileRows, RowSpan
from sglang_hc.store.host_memory import MemorySpec, memory_file
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.process import messages as wire
from sglang_hc.store.process import supervisor as io_supervisor
from sglang_hc.store.process.messages import DiskSpec
from sglang_hc.store.process.opening import Io, open_io
from sglang_hc.store.process.supervisor import IoSupervisor, State
from sglang_hc.store.process.worker import Worker
from support.disk_store import (
    FINGERPRINT,
    LAYOUT,
    SMALL,
    data_of,
    empty_slot,
    make_path,
    open_store,
    put,
)

SLOTS = 64
MEMORY = MemorySpec(LAYOUT, SLOTS, BLOCK_TOKENS, 2, 2)


def disk_spec(*folders: Path) -> DiskSpec:
    specs = tuple(DirectorySpec(str(folder), SMALL) for folder in folders)
    return DiskSpec(specs, FINGERPRINT, "tiny", 0)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_supervisor, "FIRST_BACKOFF_S", 0.05)


@pytest.fixture
def io(tmp_path: Path) -> Iterator[Io]:
    io = open_io("process", MEMORY, disk_spec(tmp_path / "d"))
    yield io
    close(io)


def close(io: Io) -> None:
    if io.blocks is not None:
        io.blocks.close()
    io.executor.close()


def supervisor(io: Io) -> IoSupervisor:
    return io.executor._supervisor


def pid_of(io: Io) -> int:
    pid = supervisor(io).pid
    assert pid is not None
    return pid


def soon() -> float:
    return time.monotonic() + 30


def until(what: Callable[[], object], io: Io) -> None:
    """Poll until something is true."""
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end, "it never came"
        io.executor.poll()
        time.sleep(0.002)


def answers(io: Io, count: int) -> list:
    done: list = []
    until(lambda: done.extend(io.blocks.poll()) or len(done) >= count, io)
    return done


def save(io: Io, blocks: list[Block], first_slot: int = 0) -> None:
    for slot, block in enumerate(blocks, start=first_slot):
        io.memory.pool.slot(slot)[:] = data_of(block)
        assert io.blocks.write(slot, block, slot, soon())
    assert {done.outcome for done in answers(io, len(blocks))} == {Outcome.OK}


def check_read(io: Io, blocks: list[Block], first_slot: int = 32) -> None:
    for slot, block in enumerate(blocks, start=first_slot):
        io.memory.pool.slot(slot)[:] = 0
        io.blocks.read(slot, block.block_id, slot, soon())
    assert {done.outcome for done in answers(io, len(blocks))} == {Outcome.OK}
    for slot, block in enumerate(blocks, start=first_slot):
        assert np.array_equal(io.memory.pool.slot(slot), data_of(block))


def names(blocks: list[Block]) -> list[bytes]:
    return [block.block_id for block in blocks]


# -- the same as threads --------------------------------------------------------------------------


def test_it_loads_neither_torch_nor_sglang() -> None:
    code = (
        "import sglang_hc.store.process.worker, sys; "
        "print(sorted({'torch', 'sglang'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def test_blocks_go_to_disk_and_come_back(io: Io) -> None:
    blocks = make_path(6)
    save(io, blocks)
    assert io.blocks.contains([*names(blocks), bytes(16)]) == 6
    assert io.blocks.capacity >= 6 and io.blocks.levels() == {
        "disk_blocks": 6,
        "disk_directories": 1,
    }
    check_read(io, blocks)
    io.blocks.write(70, blocks[0], 0, soon())
    io.blocks.read(71, bytes(16), 32, soon())
    io.blocks.read(72, blocks[0].block_id, 33, time.monotonic())
    assert [done.outcome for done in sorted(answers(io, 3))] == [
        Outcome.DUPLICATE, Outcome.MISSING, Outcome.TIMED_OUT,
    ]  # fmt: skip


def test_rows_are_filed_in_order(io: Io) -> None:
    memory = io.memory
    memory.buffers[0].hidden[:] = np.arange(BLOCK_TOKENS, dtype=np.uint8)[None, :, None]
    memory.buffers[2].kv[1][:] = 9
    io.executor.submit(9, FileRows(0, (RowSpan(2, 0, 60, 4),)))
    io.executor.submit(8, FileRows(2, (RowSpan(0, 0, 0, BLOCK_TOKENS),)))
    io.executor.submit(7, CopyRows(0, 1, BLOCK_TOKENS))
    assert io.executor.drain() == [Completion(ticket, True) for ticket in (9, 8, 7)]
    assert memory.pool.hidden[1, 2, 60:, 0].tolist() == [2, 3, 4, 5]
    assert (memory.pool.kv[1][0] == 9).all() and not memory.pool.kv[0].any()
    assert not memory.pool.kv[1][1].any(), "a copy takes hidden states only"


def test_a_failed_operation_is_an_answer(io: Io) -> None:
    io.executor.submit(1, FileRows(99, (RowSpan(0, 0, 0, 1),)))
    io.executor.submit(2, CopyRows(0, 1, 4))
    assert [done.ok for done in io.executor.drain()] == [False, True]


def test_what_leaves_the_disk_leaves_the_mirror(io: Io) -> None:
    """More than the budget holds: whatever the mirror still knows is there."""
    written = []
    for seed in range(12):
        blocks = make_path(8, seed=seed)
        save(io, blocks)
        written += names(blocks)
    until(lambda: io.blocks.counts()["disk_evicted_blocks"] > 0, io)
    known = [name for name in written if io.blocks.contains([name])]
    assert 0 < len(known) < len(written)
    for slot, name in enumerate(known[:SLOTS]):
        io.blocks.read(slot, name, slot, soon())
    assert {done.outcome for done in answers(io, len(known[:SLOTS]))} == {Outcome.OK}


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there the collector sees every dict")
def test_the_garbage_collector_passes_over_the_mirror(tmp_path: Path) -> None:
    blocks = make_path(9)
    for first in (0, 6):  # what a process names at its start, and what is written and leaves
        io = open_io("process", MEMORY, disk_spec(tmp_path / "d"))
        save(io, blocks[first : first + 6])
        assert io.blocks.contains(names(blocks[first : first + 6])) == len(
            blocks[first : first + 6]
        )
        assert not gc.is_tracked(io.blocks._known)
        close(io)


def test_what_waiting_requests_need_is_evicted_last(io: Io) -> None:
    needed = make_path(6, seed=100)
    save(io, needed)
    io.blocks.expect({name: 0.0 for name in names(needed)})
    for seed in range(12):
        others = make_path(8, seed=seed)
        save(io, others)
        io.blocks.touch(names(others))
    until(lambda: io.blocks.counts()["disk_evicted_blocks"] > 0, io)
    assert io.blocks.contains(names(needed)) == 6


def test_clear_is_at_once(io: Io) -> None:
    blocks = make_path(4)
    save(io, blocks)
    io.blocks.clear()
    assert io.blocks.contains(names(blocks)) == 0
    assert not io.blocks.write(1, blocks[0], 0, soon()), "until the old ones are gone"
    until(lambda: io.blocks.write(1, blocks[0], 0, soon()), io)
    assert answers(io, 1)[0].outcome is Outcome.OK
    assert io.blocks.contains(names(blocks)) == 1


def test_a_new_process_knows_what_the_last_one_wrote(tmp_path: Path) -> None:
    blocks = make_path(5)
    for _ in range(2):
        io = open_io("process", MEMORY, disk_spec(tmp_path / "a", tmp_path / "b"))
        if not io.blocks.contains(names(blocks)):
            save(io, blocks)
        assert io.blocks.contains(names(blocks)) == 5
        check_read(io, blocks)
        close(io)


def test_a_directory_destroyed_with_the_process_costs_its_own_blocks(tmp_path: Path) -> None:
    """What the new process does not have is one miss each; the other directory's is served."""
    io = open_io("process", MEMORY, disk_spec(tmp_path / "a", tmp_path / "b"))
    blocks = make_path(8)
    save(io, blocks)
    kept = [block for block in blocks if has_row(tmp_path / "a", block)]
    lost = [block for block in blocks if block not in kept]
    assert len(kept) == 4
    shutil.rmtree(tmp_path / "b")
    os.kill(pid_of(io), signal.SIGKILL)
    until(lambda: io.executor.counts()["io_restarts"] == 1, io)
    check_read(io, kept)
    for slot, block in enumerate(lost, start=32):
        io.blocks.read(slot, block.block_id, slot, soon())
    assert {done.outcome for done in answers(io, 4)} == {Outcome.MISSING}
    assert not any(io.blocks.contains([block.block_id]) for block in lost)
    save(io, lost)
    assert io.blocks.contains(names(blocks)) == 8
    check_read(io, blocks)
    close(io)


def has_row(folder: Path, block: Block) -> bool:
    with contextlib.closing(sqlite3.connect(folder / "sglang-hc" / "index.sqlite")) as index:
        found = index.execute("SELECT 1 FROM blocks WHERE block_id=?", (block.block_id,))
        return found.fetchone() is not None


def test_what_a_directory_takes_away_and_brings_back_reaches_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In messages of a bounded length, and in order: forget, then know again."""
    monkeypatch.setattr(wire, "IDS_PER_MESSAGE", 3)
    setup = wire.Setup(MEMORY, disk_spec(tmp_path / "a", tmp_path / "b"))
    store = open_store(tmp_path / "a", tmp_path / "b")
    blocks = make_path(16)
    put(store, blocks)
    store.close()
    said: list[bytes] = []
    socket = types.SimpleNamespace(send=lambda message, flags: said.append(message))
    worker = Worker(setup, memory_file(MEMORY), socket)
    mirror: set[bytes] = set()

    def listen() -> None:
        worker.report()
        while said:
            message = wire.decode_reply(said.pop(0))
            if isinstance(message, wire.Known):
                mirror.update(message.block_ids)
            elif isinstance(message, wire.Answers):
                assert len(message.removed) <= 3
                mirror.difference_update(message.removed)

    listen()
    assert mirror == set(names(blocks))
    second = worker._store.directories[1]
    while not second.breaker.failed():
        """Fails until it gets a pause."""
    for _ in range(4):
        listen()
    assert len(mirror) == 8 and not mirror & second.places.keys()
    second.breaker.succeeded()
    listen()
    assert mirror == set(names(blocks))
    worker.take(wire.Close())


def test_an_orderly_end_finishes_writes(tmp_path: Path) -> None:
    io = open_io("process", MEMORY, disk_spec(tmp_path / "d"))
    blocks = make_path(20)
    for slot, block in enumerate(blocks):
        io.memory.pool.slot(slot)[:] = data_of(block)
        io.blocks.write(slot, block, slot, soon())
    close(io)
    assert {done.outcome for done in io.blocks.poll()} == {Outcome.OK}
    store = open_store(tmp_path / "d")
    assert store.contains(names(blocks)) == 20
    store.close()


def test_a_directory_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"--hc-disk .*no/such: cannot be used \(No such"):
        open_io("process", MEMORY, disk_spec(tmp_path / "no" / "such"))


def test_without_a_disk_it_only_files() -> None:
    io = open_io("process", MEMORY, None)
    io.executor.submit(2, CopyRows(0, 1, 4))
    assert [done.ok for done in io.executor.drain()] == [True]
    assert io.blocks is None
    io.executor.close()


# -- loss -----------------------------------------------------------------------------------------


def test_killed_it_comes_back_with_the_same_blocks(
    io: Io, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = make_path(6)
    save(io, blocks)
    first = pid_of(io)
    os.kill(first, signal.SIGSTOP)  # so that what follows is surely under way
    io.blocks.read(1, blocks[0].block_id, 32, soon())
    io.blocks.write(2, make_path(1, seed=7)[0], 33, soon())
    io.executor.submit(2, CopyRows(0, 1, 4))
    os.kill(first, signal.SIGKILL)
    assert {done.outcome for done in answers(io, 2)} == {Outcome.LOST}
    until(lambda: supervisor(io).state is State.UP, io)
    assert io.blocks.contains(names(blocks)) == 6
    assert pid_of(io) != first
    check_read(io, blocks)
    counts = io.executor.counts()
    assert (counts["io_losses"], counts["io_restarts"], counts["io_lost_operations"]) == (1, 1, 3)
    said = [record.getMessage() for record in caplog.records]
    assert sum("is gone (signal 9)" in line for line in said) == 1
    assert sum("is back" in line for line in said) == 1


def test_a_slot_is_not_given_back_while_the_process_may_be_alive(
    io: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was told to die may still write to a slot: no answer before it is dead."""
    os.kill(pid_of(io), signal.SIGSTOP)
    io.blocks.read(1, bytes(16), 32, soon())
    with monkeypatch.context() as patch:
        patch.setattr(io_supervisor.IoLink, "exit_code", None)
        supervisor(io)._end("for the test")
        for _ in range(100):
            assert io.blocks.poll() == []
            time.sleep(0.001)
    assert answers(io, 1)[0].outcome is Outcome.LOST


def test_a_process_that_hangs_is_replaced(io: Io, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_supervisor, "HANG_S", 1.0)
    first = pid_of(io)
    os.kill(first, signal.SIGSTOP)
    io.blocks.read(1, bytes(16), 32, soon())
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
    until(lambda: io.executor.counts()["io_losses"] == 1, io)


def test_filing_goes_on_without_the_process(io: Io, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor(io), "_backoff", 1000.0)
    os.kill(pid_of(io), signal.SIGKILL)
    until(lambda: supervisor(io).state is State.DOWN, io)
    io.memory.pool.hidden[0] = 5
    io.executor.submit(1, CopyRows(0, 1, BLOCK_TOKENS))
    assert [done.ok for done in io.executor.drain()] == [True]
    assert (io.memory.pool.hidden[1] == 5).all()
    assert not io.blocks.write(1, make_path(1)[0], 0, soon())
    io.blocks.read(1, bytes(16), 2, soon())
    assert io.blocks.poll()[0].outcome is Outcome.LOST


def test_operations_stay_in_order_across_losses(io: Io) -> None:
    """Each copy takes what the last one left. When one is lost, those after it run all the same,
    so every slot holds what its last successful operation says."""
    rng = random.Random(5)
    pool = io.memory.pool
    pool.hidden[0] = 1
    submitted: dict[int, CopyRows] = {}
    done: list[Completion] = []
    for step in range(400):
        if step in (50, 51, 180, 300):
            with contextlib.suppress(TypeError):  # there is none just now
                os.kill(supervisor(io).pid, signal.SIGKILL)
        operation = CopyRows(rng.randrange(8), rng.randrange(8), BLOCK_TOKENS)
        submitted[step] = operation
        io.executor.submit(step, operation)
        done += io.executor.poll()
        if step % 50 == 49:
            time.sleep(0.2)
    done += io.executor.drain()
    assert [ticket for ticket, _ in done] == list(submitted), "in ticket order, each once"
    assert io.executor.counts()["io_losses"] >= 2


def test_back_off_grows_while_it_cannot_start(
    tmp_path: Path, io: Io, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory turns into something that cannot be used, and later back."""
    blocks = make_path(3)
    save(io, blocks)
    (tmp_path / "d").rename(tmp_path / "away")
    (tmp_path / "d").write_text("not a directory")
    os.kill(pid_of(io), signal.SIGKILL)
    until(lambda: io.executor.counts()["io_losses"] >= 3, io)
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
    until(lambda: io.executor.counts()["io_restarts"] == 1, io)
    assert "cannot be started: no memory" in caplog.text and len(attempts) == 2


ORPHAN = """
import os, sys
sys.path.insert(0, {here!r})
from test_worker import MEMORY, disk_spec, make_path, data_of, soon
from sglang_hc.store.process.opening import open_io
from pathlib import Path
io = open_io("process", MEMORY, disk_spec(Path({folder!r})))
for slot, block in enumerate(make_path(20)):
    io.memory.pool.slot(slot)[:] = data_of(block)
    io.blocks.write(slot, block, slot, soon())
print(io.executor._supervisor.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    here, folder = str(Path(__file__).parent), str(tmp_path / "d")
    code = ORPHAN.format(here=here, folder=folder)
    answer = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert answer.returncode == -signal.SIGKILL, answer.stderr
    pid = int(answer.stdout)
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "Z":
            break  # whoever inherited it has not looked yet
        assert time.monotonic() < end, "an orphan"
        time.sleep(0.01)
    store = open_store(tmp_path / "d")  # the lock is free
    for block in make_path(20):
        if store.contains([block.block_id]):
            into = empty_slot()
            assert store.read(block.block_id, into).value == "ok"
            assert np.array_equal(into, data_of(block))
    store.close()
