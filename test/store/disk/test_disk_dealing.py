"""Blocks are dealt over directories in turn, in proportion to budgets, and past those that are full
or out of use."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.disk.writer import Dealer
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    FINGERPRINT,
    LAYOUT,
    MEMORY,
    SMALL,
    data_of,
    make_path,
    open_store,
    put,
    read_bytes,
    slots_taken,
    total_bytes,
)


@dataclass(eq=False)
class FakeDirectory:
    """As much of a directory as dealing looks at. weight: slots that fit; free: slots not taken."""

    weight: int
    free: int = 1
    up: bool = True

    @property
    def slabs(self) -> FakeDirectory:
        return self

    @property
    def data_bytes(self) -> int:
        return self.weight

    def usable(self) -> bool:
        return self.up

    def free_slots(self) -> int:
        return self.free


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(1, 400))
def test_each_gets_its_proportional_part(weights: list[int], turns: int) -> None:
    """At every moment, not only in the end: within one block per directory."""
    directories = [FakeDirectory(weight) for weight in weights]
    dealer = Dealer(directories, 1)  # type: ignore[arg-type]
    got = dict.fromkeys(directories, 0)
    for turn in range(1, turns + 1):
        got[dealer.order()[0]] += 1  # type: ignore[index]
        for directory in directories:
            fair = turn * directory.weight / sum(weights)
            assert abs(got[directory] - fair) < max(2, len(weights))


@given(st.integers(1, 6), st.integers(1, 100))
def test_equal_directories_take_turns(count: int, turns: int) -> None:
    directories = [FakeDirectory(50) for _ in range(count)]
    dealer = Dealer(directories, 1)  # type: ignore[arg-type]
    chosen = [directories.index(dealer.order()[0]) for _ in range(turns)]  # type: ignore[arg-type]
    assert chosen == [turn % count for turn in range(turns)]


@given(
    st.lists(
        st.builds(FakeDirectory, st.integers(1, 9), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 20),
)
def test_nobody_evicts_while_another_has_room(directories: list[FakeDirectory], turns: int) -> None:
    dealer = Dealer(directories, 1)  # type: ignore[arg-type]
    usable = [directory for directory in directories if directory.up]
    for _ in range(turns):
        order = dealer.order()
        assert set(order) == set(usable) and len(order) == len(usable)
        assert not usable or order[0].free or not any(d.free for d in usable)  # type: ignore[attr-defined]


class Fills:
    """A store with directories of given budgets, filled with paths of four blocks."""

    def __init__(self, root: Path, budgets: list[int]) -> None:
        self.folders = [root / str(number) for number in range(len(budgets))]
        self.budgets = budgets
        specs = [
            DirectorySpec(str(folder), budget)
            for folder, budget in zip(self.folders, budgets, strict=True)
        ]
        self.store = DiskStore.open(
            specs,
            StoredModel.of(LAYOUT.chunks(), FINGERPRINT, "tiny"),
            Upkeep(background=False, scrub_bytes_per_s=0),
            DirectBackend(direct=False),
        )

    def taken(self) -> list[int]:
        return slots_taken(self.store)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([5_400_000, 5_700_000, 6_300_000]), min_size=1, max_size=3),
    st.integers(1, 50),
)
def test_a_real_store_is_balanced_and_keeps_each_budget(budgets: list[int], paths: int) -> None:
    """Nothing is evicted while any directory has room; until then the taken slots are in proportion
    to what fits; whatever lookups find is served."""
    root = Path(tempfile.mkdtemp(dir=MEMORY))
    fills = Fills(root, budgets)
    store = fills.store
    size = store.model.slot_bytes
    fits = [d.slabs.data_bytes // size for d in store.directories]
    for seed in range(paths):
        blocks = make_path(4, seed=seed)
        assert put(store, blocks) == [Outcome.OK] * 4
        for folder, budget in zip(fills.folders, budgets, strict=True):
            assert total_bytes(folder) <= budget
        written, taken = 4 * (seed + 1), fills.taken()
        if store.counters()["evicted_blocks"] == 0:
            assert sum(taken) == written
            if all(t < 0.9 * f for t, f in zip(taken, fits, strict=True)):
                for mine, fitting in zip(taken, fits, strict=True):
                    assert abs(mine - written * fitting / sum(fits)) < max(2, len(fits))
        else:
            assert sum(taken) > 0.8 * sum(fits), "evicted while there was room"
    for name in store.block_ids():
        status, got = read_bytes(store, name)
        assert status is Outcome.OK and np.array_equal(got, data_of(name))
    store.check_integrity()
    store.close()
    shutil.rmtree(root)


def test_a_new_directory_takes_what_a_full_one_would_evict_for(scratch: Path) -> None:
    full, new = scratch / "full", scratch / "new"
    store = open_store(full)
    seed = 0
    while store.counters()["evicted_blocks"] == 0:
        seed += 1
        put(store, make_path(8, seed=seed))
    store.close()
    store = open_store(full, new)
    before = len(store)
    _, fresh = store.directories
    written = 0
    while fresh.free_slots() >= 8:
        written += 8
        assert put(store, make_path(8, seed=1000 + written)) == [Outcome.OK] * 8
    assert written > 16 and store.counters()["evicted_blocks"] == 0
    assert len(store) == before + written
    assert len(fresh.places) > written // 2, "more than every second block"
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_the_one_that_is_left_gets_everything(scratch: Path, lost: int) -> None:
    store = open_store(scratch / "a", scratch / "b", size=SMALL)
    store.directories[lost].fail("for the test")
    assert put(store, make_path(8)) == [Outcome.OK] * 8
    taken = slots_taken(store)
    assert taken[lost] == 0 and taken[1 - lost] == 8
    store.close()
