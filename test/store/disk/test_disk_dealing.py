"""Blocks are dealt over directories by a hash, in proportion to budgets, and past those that are
out of use."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.writer import Dealer
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    BUFFERED,
    EIO,
    FILE,
    FINGERPRINT,
    LAYOUT,
    Faults,
    FaultyBackend,
    check_ledgers,
    file_bytes,
    is_served,
    make_path,
    only_in,
    open_store,
    put,
)
from support.disk_store import ENOSPC as FULL


@dataclass(eq=False)
class FakeDirectory:
    """As much of a directory as dealing looks at."""

    root: str
    budget: int
    up: bool = True

    def usable(self) -> bool:
        return self.up


def directories(budgets: list[int]) -> list[FakeDirectory]:
    return [FakeDirectory(f"/disk{number}", budget) for number, budget in enumerate(budgets)]


def names(count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(100, 1000), min_size=1, max_size=6), st.integers(0, 10**9))
def test_each_gets_its_proportional_part(budgets: list[int], seed: int) -> None:
    """Within five standard deviations of a fair draw."""
    some, count = directories(budgets), 2000
    dealer = Dealer(some)  # type: ignore[arg-type]
    first = [dealer.order(name)[0] for name in names(count, seed)]
    for one in some:
        share = one.budget / sum(budgets)
        spread = math.sqrt(count * share * (1 - share))
        assert abs(first.count(one) - count * share) <= 5 * spread + 1  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.data())
def test_one_less_moves_only_its_own_blocks(budgets: list[int], data: st.DataObject) -> None:
    """The others keep their order, whether it is out of use or not there."""
    some = directories(budgets)
    gone = data.draw(st.sampled_from(some))
    dealer = Dealer(some)  # type: ignore[arg-type]
    without = Dealer([one for one in some if one is not gone])  # type: ignore[arg-type, misc]
    shuffled = Dealer(data.draw(st.permutations(some)))  # type: ignore[arg-type]
    for name in names(20):
        order = dealer.order(name)
        assert sorted(map(id, order)) == sorted(map(id, some))
        assert shuffled.order(name) == order
        gone.up = False
        left = [one for one in order if one is not gone]  # type: ignore[comparison-overlap]
        assert dealer.order(name) == left == without.order(name)
        gone.up = True
    for one in some:
        one.up = False
    assert dealer.order(bytes(16)) == []


@pytest.mark.parametrize("blocks", [(40, 40), (20, 60), (20, 40, 80)])
def test_all_directories_fill_at_the_same_time(scratch: Path, blocks: tuple[int, ...]) -> None:
    folders = [scratch / str(number) for number in range(len(blocks))]
    store = DiskStore.open(
        [DirectorySpec(str(f), n * FILE) for f, n in zip(folders, blocks, strict=True)],
        StoredModel.of(LAYOUT.chunks(), FINGERPRINT, "tiny"),
        Upkeep(background=False),
        BUFFERED,
    )
    assert store.capacity == sum(blocks)
    for seed in range(sum(blocks) // 8):
        assert put(store, make_path(8, seed=seed)) == [Outcome.OK] * 8
    assert len(store) > 0.7 * sum(blocks), "most is there when as much was written as fits"
    for seed in range(100, 100 + sum(blocks) // 4):
        put(store, make_path(8, seed=seed))
        for folder, count in zip(folders, blocks, strict=True):
            assert file_bytes(folder) <= count * FILE
    for one, count in zip(store.directories, blocks, strict=True):
        assert count - 1 <= len(one.blocks) <= count, "it is full, but for what went at once"
    assert all(is_served(store, name) for name in store.block_ids())


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", ["paused", "hanging", "full", "broken"])
def test_the_one_that_is_left_gets_everything(scratch: Path, lost: int, how: str) -> None:
    faults = Faults()
    store = open_store(scratch / "a", scratch / "b", backend=FaultyBackend(faults))
    bad, good = store.directories[lost], store.directories[1 - lost]
    if how in ("full", "broken"):
        faults.on_write = only_in(f"{scratch}/{'ab'[lost]}/", FULL if how == "full" else EIO)
    elif how == "hanging":
        bad.note_hang(True)
    else:
        while not bad.breaker.failed():
            pass
    assert put(store, make_path(12)) == [Outcome.OK] * 12
    assert len(bad.blocks) == 0 and len(good.blocks) == 12
    check_ledgers(store)
    assert all(is_served(store, name) for name in store.block_ids())


def test_a_block_in_two_directories_is_served_from_the_one_that_is_well(scratch: Path) -> None:
    """It was written again while the first could not be asked."""
    store = open_store(scratch / "a", scratch / "b", backend=BUFFERED)
    (block,) = make_path(1)
    first, second = store.order(block.block_id)
    assert put(store, [block]) == [Outcome.OK] and block.block_id in first.blocks
    first.note_hang(True)
    assert store.contains([block.block_id]) == 0
    assert put(store, [block]) == [Outcome.OK] and block.block_id in second.blocks
    first.note_hang(False)
    assert store.block_ids() == [block.block_id] * 2
    Path(first.path(block.block_id)).write_bytes(b"damaged")
    outcomes = [is_served(store, block) for _ in range(2)]
    assert outcomes[-1] and store.contains([block.block_id]) == 1
