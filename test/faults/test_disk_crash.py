"""Power cuts and kills at any moment of a workload.

The images model this. Slab files: every byte written since the file's last sync is kept, lost, or
torn at 512-byte sectors, each write on its own; a file whose directory was not synced may be
missing; a removed one may be back. The index: SQLite's own files at that moment, its log cut
anywhere behind the last commit that was synced (a synced commit is durable, the tail behind it is
not). Not modelled: a power cut inside SQLite's own checkpoint; SQLite has its own crash tests.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "store" / "disk"))
from disk_support import (
    CrashBackend,
    copy_index,
    data_of,
    make_path,
    open_store,
    put,
    read_bytes,
)

from sglang_hc.store.disk import index_file
from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.disk.index import Index
from sglang_hc.store.disk.reader import ReadStatus
from sglang_hc.store.disk.store import DiskStore
from sglang_hc.store.disk.writer import Block, WriteStatus

Check = Callable[[list[Path], "Workload"], None]


class Workload:
    """Writes, deletes and evictions on a store whose power may fail at any event.

    synced: acknowledged and not removed since. removed: ever removed, so an image may hold an old
    row of theirs whose slot belongs to somebody else by now. cuts: images looked at, by what was
    going on when the power failed. lock: time stands still while an image is made.
    """

    def __init__(self, folder: Path, directories: int, size: int, check: Check) -> None:
        self.live = [folder / f"live{number}" for number in range(directories)]
        self.folder = folder
        self.size = size
        self.synced: set[bytes] = set()
        self.removed: set[bytes] = set()
        self.durable_log = {str(path): 0 for path in self.live}
        self.check = check
        self.cuts: Counter[str] = Counter()
        self.checking = False
        self.lock = threading.RLock()
        self.events = 0
        self.rng = random.Random(7)
        self.backend = CrashBackend(self.event)

    def event(self, kind: str) -> None:
        """The power may fail here: look at what it would leave."""
        with self.lock:
            if self.checking:
                return
            self.events += 1
            image = [self.folder / f"image{self.events}-{n}" for n in range(len(self.live))]
            if not self.leave(image):
                return
            self.checking = True
            try:
                self.check(image, self)
            finally:
                self.checking = False
            self.cuts[kind] += 1
            for path in image:
                shutil.rmtree(path)

    def leave(self, image: list[Path]) -> bool:
        """Write what a power cut leaves now. False while not every directory has an index."""
        for live, target in zip(self.live, image, strict=True):
            index = live / "sglang-hc" / "index.sqlite"
            if not index.exists():
                continue
            (target / "sglang-hc").mkdir(parents=True)
            log = Path(f"{index}-wal")
            size = log.stat().st_size if log.exists() else 0
            cut = self.rng.randint(min(self.durable_log[str(live)], size), size)
            copy_index(index, target / "sglang-hc" / "index.sqlite", cut)
        if not all(target.exists() for target in image):
            return False

        def target_of(path: str) -> str:
            for live, target in zip(self.live, image, strict=True):
                path = path.replace(str(live) + "/", str(target) + "/")
            return path

        self.backend.leave(target_of, self.rng)
        return True

    @contextmanager
    def watching_commits(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Note how much of each log is durable, and let the power fail around commits too."""
        real = Index._transaction
        workload = self

        @contextmanager
        def transaction(index: Index, durable: bool) -> Iterator[object]:
            with workload.lock:
                with real(index, durable) as connection:
                    yield connection
                if durable:
                    live = str(Path(index.path).parents[1])
                    workload.durable_log[live] = os.stat(index.path + "-wal").st_size
                workload.event("after commit")

        with monkeypatch.context() as patch:
            patch.setattr(Index, "_transaction", transaction)
            patch.setattr(index_file, "_WAL_TRUNCATE_AT", 200_000)
            yield

    def run(self, batches: int, count: int, writers: int = 1) -> None:
        """Batches of blocks, `writers` of them at once, a delete now and then, a close and a
        restart in the middle."""
        store = open_store(*self.live, size=self.size, backend=self.backend)
        for batch in range(batches):
            paths = [make_path(count, seed=batch + 1000 * writer) for writer in range(writers)]
            with ThreadPoolExecutor(writers) as threads:
                list(threads.map(self.write, [store] * writers, paths))
            if batch % 2:
                # From here on the row may or may not survive.
                gone = make_path(count, seed=batch - 1)[-1].block_id
                self.removed.add(gone)
                self.synced.discard(gone)
                store.delete([gone])
            if batch == batches // 2:
                store.close()
                store = open_store(*self.live, size=self.size, backend=self.backend)
        store.close()

    def write(self, store: DiskStore, blocks: list[Block]) -> None:
        answers = put(store, blocks)
        with self.lock:
            self.note_removed(store)
            self.synced |= {
                block.block_id
                for block, answer in zip(blocks, answers, strict=True)
                if answer is WriteStatus.OK
            }

    def note_removed(self, store: DiskStore) -> None:
        gone = set(store.drain_removed())
        self.removed |= gone
        self.synced -= gone


def check_image(image: list[Path], work: Workload) -> None:
    """Every synced block is there and every block that is served verifies."""
    store = open_store(*image, size=work.size, backend=DirectBackend(direct=False))
    try:
        present = set(store.block_ids())
        lost = work.synced - present
        assert not lost, f"{len(lost)} synced blocks are lost"
        for name in present:
            status, got = read_bytes(store, name)
            if status is ReadStatus.OK:
                assert np.array_equal(got, data_of(name)), "bytes that are not the block's"
            else:
                assert status is ReadStatus.DAMAGED and name in work.removed
        store.check_integrity()
        extra = make_path(2, seed=999)
        assert put(store, extra) == [WriteStatus.OK] * 2
        assert all(read_bytes(store, b.block_id)[0] is ReadStatus.OK for b in extra)
    finally:
        store.close()


def check_evicting(image: list[Path], work: Workload) -> None:
    """As `check_image`, but what a write evicts is only noted when it is over."""
    store = open_store(*image, size=work.size, backend=DirectBackend(direct=False))
    try:
        found = set(store.block_ids())
        for name in found:
            status, got = read_bytes(store, name)
            assert status is not ReadStatus.OK or np.array_equal(got, data_of(name))
        lost = work.synced - found
        assert len(lost) <= 8, "more is gone than one batch could evict"
        store.check_integrity()
    finally:
        store.close()


MOMENTS = {
    "create",
    "write",
    "allocate",
    "before sync",
    "after sync",
    "sync directory",
    "after commit",
}
"""Where the power fails in a workload that drops no slab."""


@pytest.mark.parametrize("directories", [1, 2])
def test_after_a_power_cut_at_any_write_or_sync(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, directories: int
) -> None:
    work = Workload(scratch, directories, 6_000_000, check_image)
    with work.watching_commits(monkeypatch):
        work.run(batches=2, count=3)
    assert work.cuts.keys() == MOMENTS and work.cuts.total() > 40
    assert work.synced and work.removed


def test_after_a_power_cut_while_two_threads_write(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workload(scratch, 2, 6_000_000, check_image)
    with work.watching_commits(monkeypatch):
        work.run(batches=2, count=2, writers=2)
    assert work.cuts.keys() == MOMENTS and work.cuts.total() > 80


@pytest.mark.slow
@pytest.mark.parametrize("writers", [1, 3])
@pytest.mark.parametrize("directories", [1, 2])
def test_after_a_power_cut_in_a_long_workload(
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    tell: Callable[[str], None],
    directories: int,
    writers: int,
) -> None:
    """Every block gives one image for each directory. A new slab alone gives eight more, so the
    sum follows from how many slabs hold the blocks, not from how many blocks there are."""
    work = Workload(scratch, directories, 12_000_000, check_image)
    with work.watching_commits(monkeypatch):
        work.run(batches=18 // writers, count=6, writers=writers)
    tell(
        f"{work.cuts.total()} power cuts, {directories} directories, {writers} writers: every "
        f"synced block there, every served block verified; {dict(work.cuts)}"
    )
    slabs = work.cuts["create"]
    assert work.cuts["write"] == 18 * 6 * directories + slabs  # a slab's header is one write
    assert work.cuts["before sync"] == work.cuts["after sync"] >= slabs + 18 // writers
    assert work.cuts.keys() == MOMENTS and work.cuts.total() > 200


@pytest.mark.slow
@pytest.mark.parametrize("directories", [1, 2])
def test_after_a_power_cut_while_evicting(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None], directories: int
) -> None:
    """Slots change owners: an image may hold rows whose slot was given away."""
    work = Workload(scratch, directories, 5_300_000, check_evicting)
    with work.watching_commits(monkeypatch):
        work.run(batches=16, count=6)
    tell(
        f"{work.cuts.total()} power cuts while evicting, {directories} directories, "
        f"{len(work.removed)} blocks removed: every served block verified; {dict(work.cuts)}"
    )
    assert work.cuts.total() > 300 and len(work.removed) > 16


# -- the real thing -------------------------------------------------------------------------------


def write_until_killed(folder: Path, turn: int, log: int) -> None:
    """In a child process: two threads write paths and note each block once it is acknowledged."""
    store = open_store(folder, size=30_000_000, background=True)

    def write(number: int) -> None:
        blocks = make_path(8, seed=turn * 100_000 + number)
        for block, answer in zip(blocks, put(store, blocks), strict=True):
            if answer is WriteStatus.OK:
                os.write(log, block.block_id)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, range(10_000)))


def committed_rows(folder: Path, scratch: Path) -> set[bytes]:
    """Identities of the blocks whose rows were committed, seen in a copy: to look at the index
    itself would already recover it. None when the kill came before there was a table."""
    copy = scratch / "committed.sqlite"
    with suppress(FileNotFoundError, sqlite3.OperationalError):
        copy_index(folder / "sglang-hc" / "index.sqlite", copy, None)
        with closing(sqlite3.connect(copy)) as connection:
            return {name for (name,) in connection.execute("SELECT block_id FROM blocks")}
    return set()


def kill_and_check(folder: Path, turn: int, rng: random.Random, noted: set[bytes]) -> int:
    """Kill a writer, then find every block that it noted (added to `noted`) or committed, and
    verify every block that is served. Returns how many were committed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            write_until_killed(folder, turn, writer)
        finally:
            os._exit(1)
    os.close(writer)
    os.set_blocking(reader, False)
    if turn % 4:  # every fourth dies while it opens the store or soon after
        select.select([reader], [], [], 30)
    time.sleep(rng.random() * 0.15)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    acknowledged = b""
    with os.fdopen(reader, "rb") as pipe:
        acknowledged = pipe.read() or b""
    noted |= {acknowledged[i : i + 16] for i in range(0, len(acknowledged), 16)}
    committed = committed_rows(folder, folder.parent)
    store = open_store(folder, size=30_000_000)
    present = set(store.block_ids())
    assert noted <= committed, "a block was acknowledged before its row was committed"
    assert committed <= present, "a block whose row was committed is lost"
    for name in present:
        status, got = read_bytes(store, name)
        assert status is ReadStatus.OK, "a block was found that does not verify"
        assert np.array_equal(got, data_of(name))
    store.check_integrity()
    store.close()
    return len(committed)


def kill_often(tmp_path: Path, times: int) -> str:
    """Kills a writer so many times; says what was found."""
    rng = random.Random(3)
    noted: set[bytes] = set()
    acknowledged = committed = seen = 0
    folder = tmp_path / "disk"
    for turn in range(times):
        if len(noted) > 500:  # a fresh directory before anything has to be evicted
            acknowledged, committed, seen = acknowledged + len(noted), committed + seen, 0
            noted = set()
            folder = tmp_path / f"disk{turn}"
        seen = kill_and_check(folder, turn, rng, noted)
    acknowledged, committed = acknowledged + len(noted), committed + seen
    assert acknowledged > times, "the kills came too early to say anything"
    return (
        f"{times} kills while two threads wrote: {acknowledged} blocks acknowledged, {committed} "
        "rows committed; 100 % of both found again, 0 unverifiable blocks served"
    )


def test_ten_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    kill_often(tmp_path, 10)


@pytest.mark.slow
def test_two_hundred_kills_lose_nothing_that_was_acknowledged(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    tell(kill_often(tmp_path, 200))
