"""Several models, and parts of one, make room for each other in one directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import DiskStore
from sglang_hc.store.outcome import Outcome
from support.clock import Clock
from support.disk_filling import fill, left, names
from support.disk_store import (
    FILE,
    check_ledgers,
    file_bytes,
    make_path,
    open_store,
    put,
)

OTHER = BlockLayout(LayerPlan(0, 4, 0), StateShape(4, 128, (64, 64), "float16"))
OTHER_NAME = OTHER.fingerprint("other")


def open_other(path: Path, clock: Callable[[], float], size: int = 40 * FILE) -> DiskStore:
    return open_store(path, size=size, layout=OTHER, fingerprint=OTHER_NAME, clock=clock)


def put_other(store: DiskStore, seed: int, count: int = 8) -> None:
    blocks = make_path(count, seed=seed, fingerprint=OTHER_NAME)
    assert put(store, blocks) == [Outcome.OK] * count


def others_left(store: DiskStore) -> list[int]:
    paths = {seed: make_path(8, seed=seed, fingerprint=OTHER_NAME) for seed in range(40)}
    ids = {seed: [block.block_id for block in path] for seed, path in paths.items()}
    return [seed for seed in range(40) if store.contains(ids[seed]) == 8]


def test_models_share_a_directory_one_after_the_other(scratch: Path, clock: Clock) -> None:
    """What was used longest ago goes, of whichever model."""
    store = open_store(scratch, size=40 * FILE, clock=clock)
    fill(store, range(5), clock)
    store.close()
    other = open_other(scratch, clock)
    assert other.model.file_bytes != FILE and len(other) == 0
    clock.now += 60
    put_other(other, 50)
    assert file_bytes(scratch) <= 40 * FILE
    check_ledgers(other)
    other.close()
    store = open_store(scratch, size=40 * FILE, clock=clock)
    assert left(store) == [2, 3, 4], "their files are larger: nine had to go"
    store.close()


def test_two_models_evict_each_others_oldest_blocks_for_ever(scratch: Path, clock: Clock) -> None:
    """Once the blocks of the other that were known at first were gone, only the own ones went."""
    store, other = open_store(scratch, size=40 * FILE, clock=clock), open_other(scratch, clock)
    size = other.model.file_bytes
    for turn in range(12):
        for one in (store, other):
            clock.now += 60
            one.tick()
        fill(store, range(turn, turn + 1), clock)
        clock.now += 60
        put_other(other, turn)
        assert file_bytes(scratch) <= 40 * FILE
        for one in (store, other):
            one.directories[0].find_others()
        if turn > 3:
            mine, theirs = left(store), others_left(other)
            assert mine[-1:] == [turn] and theirs[-1:] == [turn]
            assert abs(len(mine) - len(theirs)) <= 1, "they age alike"
            assert file_bytes(scratch) > 40 * FILE - 2 * size
    check_ledgers(store)
    store.close()
    other.close()


def test_what_another_model_stores_later_is_evicted_too(scratch: Path, clock: Clock) -> None:
    """Once what was known of it at first was gone, only the own blocks went."""
    store, other = open_store(scratch, size=40 * FILE, clock=clock), open_other(scratch, clock)
    for turn in range(3):
        clock.now += 60
        put_other(other, turn)
        for seed in range(10 * turn, 10 * turn + 5):
            fill(store, range(seed, seed + 1), clock)
            store.tick()
        other.directories[0].find_others()
        assert len(other) == 0 and len(store) >= 36
    check_ledgers(store)
    store.close()
    other.close()


def test_uses_by_the_server_of_another_model_are_respected(scratch: Path, clock: Clock) -> None:
    """Ranks of one server are such servers: each has its own part of all blocks."""
    store = open_store(scratch, size=40 * FILE, clock=clock)
    other = open_store(scratch, size=40 * FILE, clock=clock, part=b"p" * 16)
    fill(store, range(2), clock)
    fill(other, range(2, 5), clock)
    other.tick()
    fill(other, range(5, 6), clock)
    other.directories[0].find_others()
    store.directories[0].find_others()
    assert left(store) == [1] and left(other) == [2, 3, 4, 5]
    clock.now += 60
    store.touch(names(1))
    store.directories[0].note_touches()
    fill(other, range(6, 8), clock)
    store.directories[0].find_others()
    assert left(store) == [1] and left(other) == [4, 5, 6, 7]
    store.close()
    other.close()
