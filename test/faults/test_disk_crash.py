"""Power cuts at any moment of a workload; real kills are in test_disk_kills.

The images model this. Slab files: every byte written since the file's last sync is kept, lost, or
torn at 512-byte sectors, each write on its own; a file whose directory was not synced may be
missing; a removed one may be back. The index: SQLite's own files at that moment, its log cut
anywhere behind the last commit that was synced (a synced commit is durable, the tail behind it is
not). Not modelled: a power cut inside SQLite's own checkpoint; SQLite has its own crash tests.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import index_file
from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.disk.index import Index
from sglang_hc.store.disk.store import DiskStore
from sglang_hc.store.disk.writer import Block
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    LAYOUT,
    CrashBackend,
    copy_index,
    data_of,
    empty_slot,
    make_path,
    open_store,
    put,
    read_block,
    read_bytes,
    remove,
)

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
            # `Index.insert` holds the index's lock when it comes here. In the other order two
            # writers would wait for each other.
            with index._lock, workload.lock:
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
                remove(store, [gone])
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
                if answer is Outcome.OK
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
            if status is Outcome.OK:
                assert np.array_equal(got, data_of(name)), "bytes that are not the block's"
            else:
                assert status is Outcome.DAMAGED and name in work.removed
        store.check_integrity()
        extra = make_path(2, seed=999)
        assert put(store, extra) == [Outcome.OK] * 2
        assert all(read_bytes(store, b.block_id)[0] is Outcome.OK for b in extra)
    finally:
        store.close()


def check_evicting(image: list[Path], work: Workload) -> None:
    """As `check_image`, but what a write evicts is only noted when it is over."""
    store = open_store(*image, size=work.size, backend=DirectBackend(direct=False))
    try:
        found = set(store.block_ids())
        for name in found:
            status, got = read_bytes(store, name)
            assert status is not Outcome.OK or np.array_equal(got, data_of(name))
        lost = work.synced - found
        assert len(lost) <= 8, "more is gone than one batch could evict"
        store.check_integrity()
    finally:
        store.close()


OTHER = BlockLayout(LayerPlan(0, 4, 0), StateShape(4, 128, (64, 64), "float16"))
"""Another model, with larger slots."""


def check_both_models(image: list[Path], work: Workload) -> None:
    """Whichever model comes next: what it is served verifies, and what OTHER synced is there."""
    for layout in (OTHER, LAYOUT):
        options = {"layout": layout, "fingerprint": layout.fingerprint("tiny")}
        store = open_store(
            *image, size=work.size, backend=DirectBackend(direct=False), clock=later, **options
        )
        found = store.block_ids()
        into = empty_slot(layout.slot_bytes)
        for name in found:
            if read_block(store, name, into) is Outcome.OK:
                assert np.array_equal(into, data_of(name, layout.slot_bytes))
        assert layout is LAYOUT or work.synced <= set(found), "a synced block is lost"
        store.check_integrity()
        store.close()


def later() -> float:
    return time.time() + 1000


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
        work.run(batches=2, count=5, writers=2)
    assert work.cuts.keys() == MOMENTS and work.cuts.total() > 80


def test_after_a_power_cut_while_slabs_pass_to_another_model(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workload(scratch, 1, 5_300_000, check_both_models)
    fingerprint = OTHER.fingerprint("tiny")
    with work.watching_commits(monkeypatch):
        store = open_store(*work.live, size=work.size, backend=DirectBackend(direct=False))
        for seed in range(6):
            put(store, make_path(6, seed=seed))
        store.close()
        store = open_store(
            *work.live,
            size=work.size,
            backend=work.backend,
            clock=later,
            layout=OTHER,
            fingerprint=fingerprint,
        )
        for block in make_path(4, seed=50, fingerprint=fingerprint):
            data = memoryview(data_of(block, OTHER.slot_bytes))
            assert store.write_many([(block, data)]) == [Outcome.OK]
            work.synced.add(block.block_id)
        store.close()
    assert work.cuts.keys() == MOMENTS | {"remove"}


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
    """Every block gives one image. A new slab alone gives eight more, so the sum follows from how
    many slabs hold the blocks, not from how many blocks there are."""
    work = Workload(scratch, directories, 12_000_000, check_image)
    with work.watching_commits(monkeypatch):
        work.run(batches=18 // writers, count=6, writers=writers)
    tell(
        f"{work.cuts.total()} power cuts, {directories} directories, {writers} writers: every "
        f"synced block there, every served block verified; {dict(work.cuts)}"
    )
    slabs = work.cuts["create"]
    assert work.cuts["write"] == 18 * 6 + slabs  # a slab's header is one write
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
