"""A remote store on two ranks: what both believe of it, and what one rank's part of it decides."""

from __future__ import annotations

import math
import time

import pytest

from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.known_blocks import KnownBlocks, Presence
from sglang_hc.store.outcome import Outcome
from support.fake_store import FakeStoreIo
from support.several_ranks import Group, name, no_wait

PATH = [name(number) for number in range(5)]


class Pair:
    """Two ranks, each with its own view of a store."""

    def __init__(self) -> None:
        self.group: Group = Group(2, no_wait)
        self.stores = [FakeStoreIo(), FakeStoreIo()]
        self.blocks = [
            KnownBlocks(agreement.blocks(store), agreement.clock)
            for agreement, store in zip(self.group.agreements, self.stores, strict=True)
        ]
        self.counts = [store.counts for store in self.stores]

    def a_pass(self, patience: float = 0.0) -> list[list[BlockDone]]:
        self.group.begin_pass(patience, requests=False)
        return [blocks.poll() for blocks in self.blocks]

    def known(self) -> list[int]:
        return [blocks.contains(PATH) for blocks in self.blocks]

    def asked(self) -> list[bool]:
        return [blocks.ask(PATH) for blocks in self.blocks]

    def move(self, ends: tuple[Outcome, Outcome], *, write: bool = False) -> list[list[BlockDone]]:
        """The first block is read or written on both, which ends so."""
        for blocks, store, end in zip(self.blocks, self.stores, ends, strict=True):
            if write:
                blocks.write(1, Block(PATH[0], name(99), "", 0, b""), 0, 30.0)
            else:
                blocks.read(1, PATH[0], 0, 30.0)
            store.step(end)
        return self.a_pass()


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_path_is_there_as_far_as_every_rank_finds_its_part(pair: Pair) -> None:
    pair.stores[0].hold(PATH[:4])
    pair.stores[1].hold(PATH[:2])
    assert pair.asked() == [True, True] and pair.known() == [0, 0]
    pair.stores[0].answer()
    pair.a_pass()
    assert pair.asked() == [True, True] and pair.known() == [0, 0]
    pair.stores[1].answer()
    assert pair.known() == [0, 0], "nobody acts on an answer of its own"
    pair.a_pass(patience=math.inf)
    assert pair.known() == [2, 2] and pair.asked() == [False, False]
    assert [counts["remote_lookups"] for counts in pair.counts] == [1, 1]


@pytest.mark.parametrize("ends", [Outcome.TIMED_OUT, Outcome.IO_ERROR])
def test_what_one_rank_is_not_told_is_absent_for_a_while(pair: Pair, ends: Outcome) -> None:
    for store in pair.stores:
        store.hold(PATH)
    assert pair.asked() == [True, True]
    pair.stores[0].answer()
    pair.stores[1].answer(ends)
    pair.a_pass()
    assert pair.asked() == [False, False] and pair.known() == [0, 0]
    for counts in pair.counts:
        assert counts[f"remote_lookup_{ends.value}"] == 1
    assert pair.group.agreements[0].counts() == {f"rank1_lookup_{ends.value}": 1}
    pair.group.now += Presence.ABSENT.value
    assert pair.asked() == [False, False], "the clock of decisions has not heard of it"
    pair.a_pass()
    assert pair.asked() == [True, True]
    for store in pair.stores:
        store.answer()
    pair.a_pass()
    assert pair.known() == [5, 5]


def test_a_block_is_stored_when_all_parts_are(pair: Pair) -> None:
    pair.move((Outcome.OK, Outcome.IO_ERROR), write=True)
    assert pair.known() == [0, 0] and all(blocks.wants(PATH[0]) for blocks in pair.blocks)
    first, second = pair.move((Outcome.OK, Outcome.OK), write=True)
    assert first == second == [BlockDone(1, Outcome.OK, "remote", None)]
    assert pair.known() == [1, 1] and not any(blocks.wants(PATH[0]) for blocks in pair.blocks)


@pytest.mark.parametrize("end", [Outcome.MISSING, Outcome.DAMAGED, Outcome.TIMED_OUT])
def test_a_part_that_is_not_read_makes_the_block_a_miss_for_all(pair: Pair, end: Outcome) -> None:
    pair.move((Outcome.OK, Outcome.OK), write=True)
    for done in pair.move((Outcome.OK, end)):
        assert done == [BlockDone(1, end, "remote", None)]
    assert pair.known() == [0, 0]
    useless = end is Outcome.DAMAGED
    assert [blocks.wants(PATH[0]) for blocks in pair.blocks] == [not useless] * 2
    pair.group.now += Presence.ABSENT.value
    pair.a_pass()
    assert pair.asked() == [not useless] * 2


def test_a_read_takes_as_long_as_its_slowest_part(pair: Pair) -> None:
    for store in pair.stores:
        store.hold(PATH)
    pair.group.now = 50.0
    pair.a_pass()
    began = time.monotonic()
    for blocks, store, seconds in zip(pair.blocks, pair.stores, (3.0, 2.0), strict=True):
        blocks.read(1, PATH[0], 0, 80.0)
        store.step(at=began + seconds)
    (first,), (second,) = pair.a_pass()
    assert first == second and first.at is not None
    assert first.at == pytest.approx(53.0, abs=0.5)


def test_one_rank_empties_the_store_and_nobody_looks_before_it_has(pair: Pair) -> None:
    for store in pair.stores:
        store.hold(PATH)
    for blocks in pair.blocks:
        blocks.erase(99, None, ())
    pair.a_pass()
    assert pair.asked() == [False, False]
    assert [len(store.questions) for store in pair.stores] == [1, 0]
    pair.stores[0].answer()
    pair.a_pass()
    assert pair.asked() == [True, True] and not pair.stores[0].held()


def test_nobody_waits_for_a_look_up(pair: Pair) -> None:
    """When the tiers are emptied, moves are waited for; a look-up holds no slot."""
    assert pair.asked() == [True, True]
    for agreement in pair.group.agreements:
        agreement.pause()
    assert pair.asked() == [True, True]
