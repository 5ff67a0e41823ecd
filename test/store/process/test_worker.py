"""The I/O process: the same answers as threads give, and what happens when it is lost."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from sglang_hc.store.disk.index import Index

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.block_io import Erase
from sglang_hc.store.disk import Block, DirectoryError
from sglang_hc.store.executor import Completion, CopyRows, Point, RowSpan, ScatterRows
from sglang_hc.store.host_memory import memory_file
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.process import messages as wire
from sglang_hc.store.process.opening import Io, open_io
from sglang_hc.store.process.worker import Worker
from support.disk_store import (
    data_of,
    make_path,
    open_store,
    put,
)
from support.io_process import (
    MEMORY,
    SLOTS,
    answers,
    check_read,
    close,
    disk_spec,
    names,
    pid_of,
    save,
    until,
)
from support.waiting import HANGS_S, in_time


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
    io.blocks.write(70, blocks[0], 0, in_time())
    io.blocks.read(71, bytes(16), 32, in_time())
    io.blocks.read(72, blocks[0].block_id, 33, time.monotonic())
    assert [done.outcome for done in sorted(answers(io, 3))] == [
        Outcome.DUPLICATE, Outcome.MISSING, Outcome.TIMED_OUT,
    ]  # fmt: skip


def test_rows_are_filed_in_order(io: Io) -> None:
    memory = io.memory
    memory.snapshots[0][:] = np.arange(BLOCK_TOKENS, dtype=np.uint8)[None, :, None]
    memory.snapshots[1][:] = 9
    memory.pool.kv[1][0] = 7
    io.executor.submit(9, ScatterRows(0, (RowSpan(2, 0, 60, 4),)))
    io.executor.submit(8, ScatterRows(1, (RowSpan(0, 0, 0, 8),)))
    io.executor.submit(7, CopyRows(0, 1, BLOCK_TOKENS))
    io.executor.submit(6, Point())
    assert io.executor.drain() == [Completion(ticket, True) for ticket in (9, 8, 7, 6)]
    assert memory.pool.hidden[1, 2, 60:, 0].tolist() == [2, 3, 4, 5]
    assert (memory.pool.hidden[:2, :, :8] == 9).all()
    assert (memory.pool.kv[1][0] == 7).all() and not memory.pool.kv[0].any()
    assert not memory.pool.kv[1][1].any(), "a copy takes hidden states only"


def test_a_failed_operation_is_an_answer(io: Io) -> None:
    io.executor.submit(1, ScatterRows(99, (RowSpan(0, 0, 0, 1),)))
    io.executor.submit(2, CopyRows(0, 1, 4))
    assert [done.ok for done in io.executor.drain()] == [False, True]


def test_what_leaves_the_disk_leaves_the_mirror(io: Io) -> None:
    """More than the budget holds: whatever the mirror still knows is there."""
    written = []
    for seed in range(12):
        blocks = make_path(8, seed=seed)
        save(io, blocks)
        written += names(blocks)
    until(lambda: io.counts["disk_evicted_blocks"] > 0, io)
    known = [name for name in written if io.blocks.contains([name])]
    assert 0 < len(known) < len(written)
    for slot, name in enumerate(known[:SLOTS]):
        io.blocks.read(slot, name, slot, in_time())
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
    until(lambda: io.counts["disk_evicted_blocks"] > 0, io)
    assert io.blocks.contains(names(needed)) == 6


def test_clear_is_at_once(io: Io) -> None:
    blocks = make_path(4)
    save(io, blocks)
    io.blocks.erase(9, None, ())
    assert io.blocks.contains(names(blocks)) == 0
    assert not io.blocks.write(1, blocks[0], 0, in_time()), "until the old ones are gone"
    until(lambda: io.blocks.write(1, blocks[0], 0, in_time()), io)
    ended = [(done.ticket, done.outcome, done.blocks) for done in answers(io, 2)]
    assert ended == [(9, Outcome.OK, 4), (1, Outcome.OK, 0)]
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
    until(lambda: io.counts["io_restarts"] == 1, io)
    check_read(io, kept)
    for slot, block in enumerate(lost, start=32):
        io.blocks.read(slot, block.block_id, slot, in_time())
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
            if isinstance(message, wire.Answers):
                assert len(message.changes) <= 3
                here = {name for name, there in message.changes.items() if there}
                mirror.update(here)
                mirror.difference_update(message.changes.keys() - here)

    listen()
    assert mirror == set(names(blocks))
    second = worker.disk._store.directories[1]
    while not second.breaker.failed():
        """Fails until it gets a pause."""
    for _ in range(4):
        listen()
    assert len(mirror) == 8 and not mirror & second.places.keys()
    second.breaker.succeeded()
    for _ in range(3):
        listen()
    assert mirror == set(names(blocks))
    worker.take(wire.Close())


def test_an_orderly_end_finishes_writes(tmp_path: Path) -> None:
    io = open_io("process", MEMORY, disk_spec(tmp_path / "d"))
    blocks = make_path(20)
    for slot, block in enumerate(blocks):
        io.memory.pool.slot(slot)[:] = data_of(block)
        io.blocks.write(slot, block, slot, in_time())
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


def test_an_end_waits_until_the_disk_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the index was closed under the clearing, counted as damaged, and rebuilt at the next
    start, with the blocks that were to go."""
    store = open_store(tmp_path)
    put(store, make_path(16))
    store.close()
    setup = wire.Setup(MEMORY, disk_spec(tmp_path))
    socket = types.SimpleNamespace(send=lambda message, flags: None)
    worker = Worker(setup, memory_file(MEMORY), socket)
    began, goes_on = threading.Event(), threading.Event()
    delete = Index.delete

    def slow(index: Index, rows: list) -> list:
        began.set()
        assert goes_on.wait(HANGS_S)
        return delete(index, rows)

    monkeypatch.setattr(Index, "delete", slow)
    worker.take(Erase(1, None))
    assert began.wait(HANGS_S)
    ending = threading.Thread(target=worker.take, args=(wire.Close(),))
    ending.start()
    ending.join(0.2)
    goes_on.set()
    ending.join()
    assert not (tmp_path / "sglang-hc" / "index.damaged").exists()
    store = open_store(tmp_path)
    assert store.block_ids() == []
    store.close()


def test_a_signal_to_all_processes_of_a_server_leaves_it_to_the_parent(io: Io) -> None:
    """A service manager sends SIGTERM to both: the server still has blocks to save."""
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid_of(io), number)
    blocks = make_path(6)
    save(io, blocks)
    check_read(io, blocks)
    assert io.counts["io_losses"] == 0
