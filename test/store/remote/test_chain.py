"""A disk and a remote store as one holder of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.store.chain import Chain
from sglang_hc.store.disk import DirectorySpec, DiskStore, Upkeep
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.outcome import Outcome
from support.clock import Clock
from support.fake_io import FakeIo
from support.remote import (
    FOREVER,
    MODEL,
    TARGET,
    FakeStore,
    data_of,
    find,
    make_path,
    save,
    until,
    wait,
)


@pytest.fixture
def near(tmp_path: Path, pool: HostPool, io: KnownBlocks) -> KnownBlocks:
    specs = [DirectorySpec.parse(f"{tmp_path / 'd'}:0.05")]
    store = DiskStore.open(specs, MODEL, Upkeep(background=False))
    return KnownBlocks(DiskThreads(store, pool, io.counts))


@pytest.fixture
def chain(near: KnownBlocks, io: KnownBlocks) -> Iterator[Chain]:
    yield Chain(near, io)
    near.close()


def test_a_block_goes_to_both(
    chain: Chain, near: KnownBlocks, store: FakeStore, pool: HostPool
) -> None:
    path = make_path(3)
    assert save(chain, pool, path) == [Outcome.OK] * 3
    assert near.contains([block.block_id for block in path]) == 3
    assert len(store.values) == 3
    counts = chain.counts["remote_saved_blocks"], chain.counts["disk_saved_blocks"]
    assert sum(counts) == 3, "the other three are the answers, which the owner of the slots counts"
    assert not chain.wants(path[0].block_id)


def test_a_path_may_lie_partly_here_and_partly_there(
    chain: Chain, near: KnownBlocks, io: KnownBlocks, pool: HostPool
) -> None:
    path = make_path(6)
    for holder, blocks in ((near, path[:2] + path[4:5]), (io, path[2:4] + path[5:])):
        save(holder, pool, blocks)
    names = [block.block_id for block in path]
    assert find(chain, names) == 6
    sources = [tier.value for tier in chain.sources(names)]
    tiers = []
    for name in names:
        chain.read(1, name, TARGET, FOREVER)
        (done,) = wait(chain, 1)
        assert done.outcome is Outcome.OK
        assert np.array_equal(pool.slot(TARGET), data_of(name))
        tiers.append(done.tier)
    assert tiers == sources == ["disk", "disk", "remote", "remote", "disk", "remote"]


def test_a_hung_store_does_not_keep_the_disk_from_serving(
    chain: Chain, near: KnownBlocks, store: FakeStore, pool: HostPool
) -> None:
    path = make_path(2)
    save(near, pool, path)
    store.hang()
    names = [block.block_id for block in path]
    assert chain.contains(names) == 2 and not chain.ask(names)
    chain.read(1, names[1], TARGET, FOREVER)
    assert [done.outcome for done in wait(chain, 1)] == [Outcome.OK]


def test_a_slot_is_given_back_when_both_are_through(
    chain: Chain, near: KnownBlocks, store: FakeStore, pool: HostPool, clock: Clock
) -> None:
    (block,) = make_path(1)
    store.hang()
    pool.slot(0)[:] = data_of(block.block_id)
    chain.write(41, block, 0, FOREVER)
    until(lambda: bool(near.contains([block.block_id])))
    store.wait_for_call()
    assert chain.poll() == []
    clock.now = FOREVER
    assert [done.ticket for done in wait(chain, 1)] == [41]


def test_only_the_holder_that_lacks_a_block_gets_it(
    chain: Chain, near: KnownBlocks, store: FakeStore, pool: HostPool
) -> None:
    path = make_path(1)
    save(near, pool, path)
    assert chain.wants(path[0].block_id)
    assert save(chain, pool, path) == [Outcome.OK]
    assert len(store.values) == 1


def test_clear_empties_both(chain: Chain, store: FakeStore, pool: HostPool) -> None:
    path = make_path(2)
    save(chain, pool, path)
    chain.erase(99, None, ())
    ended = sorted((done.tier, done.outcome, done.blocks) for done in wait(chain, 2))
    assert ended == [("disk", Outcome.OK, 2), ("remote", Outcome.OK, 0)] and not store.values
    assert find(chain, [block.block_id for block in path]) == 0


def test_a_dropped_write_is_counted_once() -> None:
    (block,) = make_path(1)
    near, far = FakeIo(), FakeIo()
    near.up = False
    chain = Chain(near, far)
    chain.write(1, block, 0, FOREVER)
    assert [done.outcome for done in chain.poll()] == [Outcome.DROPPED]
    assert far.contains([block.block_id]) and chain.counts == {"disk_saved_blocks": 1}
    chain.write(2, block, 0, FOREVER)
    assert [(done.ticket, done.outcome) for done in chain.poll()] == [(2, Outcome.DROPPED)]
    assert chain.counts == {"disk_saved_blocks": 1}
