"""The byte budget and the ownership of slots under random workloads."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import index_file
from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.disk.index import NAMESPACES_UNUSED, ROWS_PER_COMMIT, Index
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    MEMORY,
    data_of,
    make_path,
    open_store,
    put,
    read_bytes,
    remove,
    total_bytes,
)

OTHER = BlockLayout(LayerPlan(0, 0, 4), StateShape(4, 64, (128, 128), "float16"))
PATHS = st.integers(0, 30)
BUDGETS = st.sampled_from([5_400_000, 5_700_000, 6_300_000])


class RandomWorkload(RuleBasedStateMachine):
    """Two models take turns on two directories while everything that can happen happens."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.disks = [self.folder / "a", self.folder / "b"]
        self.now = 1.7e9
        self.store = None
        self.other = False
        self.budget = 5_700_000
        self.count = 2
        self.start(5_700_000, False, 2)

    def start(self, budget: int, other: bool, count: int) -> None:
        self.budget, self.other, self.count = budget, other, count
        self.layout = {"layout": OTHER, "fingerprint": OTHER.fingerprint()} if other else {}
        self.store = open_store(
            *self.disks[:count],
            size=budget,
            backend=DirectBackend(direct=False),
            clock=lambda: self.now,
            ttl_s=100_000,
            **self.layout,
        )

    def path(self, seed: int) -> list:
        names = {"fingerprint": OTHER.fingerprint()} if self.other else {}
        return make_path(4, seed=seed, **names)

    @rule(seed=PATHS)
    def write(self, seed: int) -> None:
        blocks = self.path(seed)
        if self.other:
            answers = self.store.write_many(
                [(b, memoryview(data_of(b, OTHER.slot_bytes))) for b in blocks]
            )
        else:
            answers = put(self.store, blocks)
        assert Outcome.IO_ERROR not in answers

    @rule(seed=PATHS)
    @precondition(lambda self: not self.other)
    def read(self, seed: int) -> None:
        for block in self.path(seed):
            known = self.store.contains([block.block_id])
            status, got = read_bytes(self.store, block.block_id)
            assert status is (Outcome.OK if known else Outcome.MISSING)
            assert not known or np.array_equal(got, data_of(block))

    @rule(seed=PATHS)
    def delete(self, seed: int) -> None:
        remove(self.store, [block.block_id for block in self.path(seed)][2:])

    @rule(seed=PATHS)
    def touch(self, seed: int) -> None:
        self.store.touch([block.block_id for block in self.path(seed)])

    @rule(seconds=st.sampled_from([1, 60, 30_000]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.store.tick()

    @rule(budget=BUDGETS, other=st.booleans(), count=st.sampled_from([1, 2]))
    def restart(self, budget: int, other: bool, count: int) -> None:
        self.store.close()
        self.start(budget, other, count)

    @invariant()
    def no_byte_above_the_budget(self) -> None:
        for disk in self.disks[: self.count]:
            assert total_bytes(disk) <= self.budget

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        self.store.check_integrity()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


TestRandomWorkload = RandomWorkload.TestCase
TestRandomWorkload.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_the_log_stays_in_its_share_while_somebody_reads(scratch: Path) -> None:
    """An open reader keeps SQLite from truncating the log: writes are refused before it grows past
    its share, and go on when the reader is gone."""
    store = open_store(scratch, size=5_300_000, backend=DirectBackend(direct=False))
    blocks = make_path(4)
    put(store, blocks)
    index = Index(str(scratch / "sglang-hc" / "index.sqlite"), read_only=True)
    index._connection.execute("BEGIN")
    index._connection.execute("SELECT count(*) FROM blocks").fetchall()
    refused = False
    for seed in range(1, 400):
        refused |= Outcome.NO_SPACE in put(store, make_path(4, seed=seed))
        assert total_bytes(scratch) <= 5_300_000
        if refused:
            break
    assert refused and store.counters()["index_refused"] > 0
    index._connection.execute("ROLLBACK")
    index.close()
    assert put(store, make_path(1, seed=999)) == [Outcome.OK]
    store.close()


def test_a_transaction_fits_what_is_kept_free_in_the_log() -> None:
    """32 rows in three trees; a page each at every level, with neighbours when it splits."""
    pages = ROWS_PER_COMMIT * 3 * 5
    assert pages * (4096 + 24) <= index_file.WAL_MAX_BYTES - index_file._WAL_TRUNCATE_AT


def test_an_index_is_never_full_of_namespaces(scratch: Path) -> None:
    """A service that gives each conversation a salt of its own had an index full of salts that
    nothing was stored under any more, and the directory took no block until the next start."""
    store = open_store(scratch, backend=DirectBackend(direct=False))
    for start in range(0, 2 * NAMESPACES_UNUSED, ROWS_PER_COMMIT):
        blocks = [
            make_path(1, namespace=f"{number:05d}" + "\u00e9" * 120)[0]
            for number in range(start, start + ROWS_PER_COMMIT)
        ]
        assert put(store, blocks) == [Outcome.OK] * ROWS_PER_COMMIT
    store.check_integrity()
    store.close()
    index = Index(str(scratch / "sglang-hc" / "index.sqlite"))
    used = "SELECT count(DISTINCT namespace) FROM blocks"
    there = "SELECT count(*) FROM namespaces"
    in_use, made = index._number(used), index._number(there)
    assert in_use > ROWS_PER_COMMIT and made <= in_use + NAMESPACES_UNUSED
    index.forget_unused(keep=1)
    assert index._number(there) == in_use
    index.close()
