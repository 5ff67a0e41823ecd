"""What rank 0 tells, when, and what all ranks make of it: blocks, the clock, points on a device."""

from __future__ import annotations

import math

import pytest

from sglang_hc.ranks.agreement import ALONE, MARK_PASSES, REPORT_S, TOGETHER_S, Agreement, Decisions
from sglang_hc.ranks.block_io import NEWS
from sglang_hc.store import known_blocks
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.circuit_breaker import FAILURES_TO_OPEN
from sglang_hc.store.executor import Completion, Point
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.outcome import Outcome
from support.fake_io import FakeIo
from support.several_ranks import Group, name, no_wait


class HeldExecutor:
    """Does nothing until it is told to."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self._done: list[Completion] = []

    def submit(self, ticket: int, operation: object) -> None:
        self.submitted.append(ticket)

    def end(self, *, ok: bool = True) -> None:
        self._done.append(Completion(self.submitted.pop(0), ok))

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        return done


class Pair:
    """Two ranks with an executor and a disk each."""

    def __init__(self) -> None:
        self.group: Group = Group(2, no_wait)
        self.executors = [HeldExecutor(), HeldExecutor()]
        self.disks = [FakeIo(writes_wait=True), FakeIo(writes_wait=True)]
        self.blocks: list[KnownBlocks] = []
        self.scatters = []
        for agreement, executor, disk in zip(
            self.group.agreements, self.executors, self.disks, strict=True
        ):
            self.scatters.append(agreement.executor(executor))
            self.blocks.append(KnownBlocks(agreement.blocks(disk, 9), agreement.clock))

    def a_pass(self, patience: float = 0.0) -> list[list[BlockDone]]:
        self.group.begin_pass(patience, requests=False)
        return [blocks.poll() for blocks in self.blocks]

    def told(self, patience: float = math.inf, *, requests: bool = False) -> bool:
        before = self.group.told
        self.group.begin_pass(patience, requests=requests)
        return self.group.told > before


def test_blocks_and_end_parts_of_one_disk_are_decided_on_their_own() -> None:
    """Both name their operations by numbers from 1 on."""
    pair = Pair()
    parts = [FakeIo(writes_wait=True), FakeIo(writes_wait=True)]
    ends = [
        KnownBlocks(agreement.blocks(disk, 9, ends=True), agreement.clock)
        for agreement, disk in zip(pair.group.agreements, parts, strict=True)
    ]
    for both in (pair.blocks, ends):
        for blocks in both:
            blocks.write(1, block(1), 0, 30.0)
    for disk in pair.disks:
        disk.step(Outcome.OK)
    for disk, outcome in zip(parts, (Outcome.OK, Outcome.NO_SPACE), strict=True):
        disk.step(outcome)
    assert [[done.outcome for done in found] for found in pair.a_pass()] == [[Outcome.OK]] * 2
    assert [[done.outcome for done in one.poll()] for one in ends] == [[Outcome.NO_SPACE]] * 2


def block(number: int) -> Block:
    return Block(name(number), name(0), "", 0, b"")


def write(pair: Pair, number: int, ends: tuple[Outcome, Outcome]) -> list[BlockDone]:
    for blocks, disk, end in zip(pair.blocks, pair.disks, ends, strict=True):
        blocks.write(number, block(number), 0, 30.0)
        disk.step(end)
    (one,), (two,) = pair.a_pass()
    assert one == two
    return [one]


def test_a_quiet_pass_tells_nothing() -> None:
    pair = Pair()
    pair.group.now = 100.0
    assert not pair.told()
    assert pair.told(requests=True)  # there is a message anyway
    pair.group.now += 5.0
    assert not pair.told()
    assert not pair.told(5.1)
    assert pair.told(5.0)
    assert [agreement.clock() for agreement in pair.group.agreements] == [105.0, 105.0]


def test_what_ended_waits_for_company_unless_there_is_much() -> None:
    pair = Pair()
    for scatters, executor in zip(pair.scatters, pair.executors, strict=True):
        for ticket in (1, 2, 3):
            scatters.submit(ticket, Point())
        executor.end()
    assert not pair.told()
    pair.group.now += TOGETHER_S
    assert pair.told()
    assert [scatters.poll() for scatters in pair.scatters] == [[Completion(1, True)]] * 2
    pair.executors[0].end()
    pair.executors[0].end()
    pair.executors[1].end()
    assert not pair.told()
    pair.executors[1].end(ok=False)
    assert pair.told()  # two: snapshot buffers wait for them
    expected = [Completion(2, True), Completion(3, False)]
    assert [scatters.poll() for scatters in pair.scatters] == [expected] * 2
    assert pair.group.agreements[0].counts() == {"rank1_scatter_io_error": 1}


def test_nobody_acts_on_a_poll_of_its_own() -> None:
    pair = Pair()
    for scatters, executor in zip(pair.scatters, pair.executors, strict=True):
        scatters.submit(1, Point())
        executor.end()
        assert scatters.poll() == []
    pair.a_pass()
    assert [scatters.poll() for scatters in pair.scatters] == [[Completion(1, True)]] * 2


def test_a_block_is_there_when_all_ranks_have_it() -> None:
    pair = Pair()
    write(pair, 1, (Outcome.OK, Outcome.OK))
    (done,) = write(pair, 2, (Outcome.OK, Outcome.NO_SPACE))
    assert done.outcome is Outcome.NO_SPACE
    (done,) = write(pair, 3, (Outcome.DUPLICATE, Outcome.OK))
    assert done.outcome is Outcome.OK
    for blocks in pair.blocks:
        assert [blocks.contains([name(n)]) for n in (1, 2, 3)] == [1, 0, 1]
        assert [blocks.wants(name(n)) for n in (1, 2, 3)] == [False, True, False]
        assert blocks.contains([name(1), name(2), name(3)]) == 1


@pytest.mark.parametrize("found", [Outcome.MISSING, Outcome.DAMAGED, Outcome.TIMED_OUT])
def test_a_read_that_fails_on_one_rank_fails_on_all(found: Outcome) -> None:
    pair = Pair()
    write(pair, 1, (Outcome.OK, Outcome.OK))
    for blocks, disk, end in zip(pair.blocks, pair.disks, (Outcome.OK, found), strict=True):
        blocks.read(2, name(1), 0, 10.0)
        disk.step(end)
    for done in pair.a_pass():
        assert done == [BlockDone(2, found, "disk", None)]
    here = found is Outcome.TIMED_OUT  # it may be read another time
    assert all(bool(blocks.contains([name(1)])) is here for blocks in pair.blocks)


def test_what_rank_0_has_is_known_to_all_a_part_at_a_time() -> None:
    pair = Pair()
    pair.disks[0].hold(name(n) for n in range(NEWS + 1))
    pair.disks[1].hold([name(NEWS + 7)])
    path = [name(n) for n in range(NEWS + 8)]
    assert [blocks.contains(path) for blocks in pair.blocks] == [0, 0]
    pair.a_pass()
    assert [blocks.contains(path) for blocks in pair.blocks] == [NEWS, NEWS]
    pair.a_pass()
    assert [blocks.contains(path) for blocks in pair.blocks] == [NEWS + 1] * 2
    assert all(blocks.wants(name(NEWS + 7)) for blocks in pair.blocks)
    pair.disks[0].evict(name(3))
    pair.disks[1].evict(name(NEWS + 7))
    pair.a_pass()
    assert [blocks.contains(path) for blocks in pair.blocks] == [3, 3]


def test_a_dropped_write_is_a_no_and_too_many_are_dropped_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_blocks, "WRITE_QUEUE", 2)
    pair = Pair()
    pair.disks[1].up = False  # drops them
    for blocks in pair.blocks:
        for number in (1, 2, 3):
            blocks.write(number, block(number), 0, 30.0)
        assert [(d.ticket, d.outcome) for d in blocks.poll()] == [(3, Outcome.DROPPED)]
    pair.disks[0].end_all()
    for done in pair.a_pass():
        assert [(d.ticket, d.outcome) for d in done] == [(1, Outcome.DROPPED), (2, Outcome.DROPPED)]
    for blocks in pair.blocks:
        blocks.write(4, block(1), 0, 30.0)
    assert len(pair.disks[0].moves) == 1


def test_a_disk_that_fails_on_one_rank_is_left_alone_by_all() -> None:
    pair = Pair()
    write(pair, 1, (Outcome.OK, Outcome.OK))
    for attempt in range(FAILURES_TO_OPEN):
        assert all(blocks.contains([name(1)]) for blocks in pair.blocks)
        for blocks, disk, end in zip(
            pair.blocks, pair.disks, (Outcome.OK, Outcome.TIMED_OUT), strict=True
        ):
            blocks.read(2 + attempt, name(1), 0, 10.0)
            disk.step(end)
        pair.a_pass()
    for blocks in pair.blocks:
        assert not blocks.contains([name(1)])
        blocks.read(20, name(1), 0, 30.0)
        assert [(d.ticket, d.outcome) for d in blocks.poll()] == [(20, Outcome.MISSING)]
    assert not any(disk.moves for disk in pair.disks)
    pair.group.now += 3600.0
    assert not any(blocks.contains([name(1)]) for blocks in pair.blocks)
    pair.a_pass()  # the clock of decisions has heard of it
    assert all(blocks.contains([name(1)]) for blocks in pair.blocks)


def test_a_deadline_counts_from_now_however_long_nothing_was_told() -> None:
    pair = Pair()
    pair.blocks[0].read(1, name(1), 0, pair.group.agreements[0].clock() + 10.0)
    import time

    left = pair.disks[0].moves[0].deadline - time.monotonic()
    assert 9.0 < left <= 10.0


def test_clearing_forgets_what_was_about_to_be_told() -> None:
    pair = Pair()
    write(pair, 1, (Outcome.OK, Outcome.OK))
    pair.disks[0].hold([name(2)])
    for blocks in pair.blocks:
        blocks.erase(99, None, ())
    pair.a_pass()
    assert not any(blocks.contains([name(n)]) for blocks in pair.blocks for n in (1, 2))


class Mark:
    def __init__(self) -> None:
        self.waited = 0

    def done(self) -> bool:
        raise AssertionError("when a device is through differs between ranks")

    def wait(self) -> None:
        self.waited += 1


def test_a_point_on_a_device_is_reached_after_some_passes() -> None:
    pair = Pair()
    event = Mark()
    mark = pair.group.agreements[1].mark(event)
    for _ in range(MARK_PASSES - 1):
        assert not mark.done()
        pair.a_pass()
    assert not mark.done() and not event.waited
    pair.a_pass()
    assert mark.done() and event.waited == 1


def test_a_point_that_was_waited_for_is_reached() -> None:
    event = Mark()
    mark = Pair().group.agreements[0].mark(event)
    mark.wait()
    assert mark.done()


def test_one_rank_alone_is_as_it_was() -> None:
    event, disk, executor = Mark(), FakeIo(), HeldExecutor()
    assert ALONE.mark(event) is event
    assert ALONE.blocks(disk, 1) is disk
    assert ALONE.executor(executor) is executor
    assert ALONE.counts() == {}


def test_decisions_travel() -> None:
    import pickle

    pair = Pair()
    pair.disks[0].hold([name(1)])
    pair.group.agreements[0].begin_pass()
    decisions = pair.group.agreements[0].decisions(0.0, requests=False)
    assert isinstance(decisions, Decisions)
    assert pickle.loads(pickle.dumps(decisions)) == decisions
    assert isinstance(pair.group.agreements[1], Agreement)


def test_ranks_show_each_other_what_they_counted_now_and_then() -> None:
    group: Group = Group(2, no_wait)
    first, second = group.agreements
    second.publish_counts(lambda: {"lost": 1})
    assert first.reports({"own": 5}) == [{"own": 5}, {"lost": 1}]
    group.now += REPORT_S - 0.1
    second.publish_counts(lambda: {"lost": 2})
    assert first.reports({})[1] == {"lost": 1}
    group.now += 0.1
    second.publish_counts(lambda: {"lost": 3})
    assert first.reports({})[1] == {"lost": 3}
    assert ALONE.reports({"own": 5}) == [{"own": 5}]
