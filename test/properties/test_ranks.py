"""Several ranks' tiers under one stream of requests, each with I/O and a device of its own pace.

What a rank's executor, disk and device have done when is drawn for each rank alone; one of them
fails, loses and damages. Whatever they do, all ranks decide alike, line by line; nobody waits for
ever; no slot is lost; and what is restored is right (the machine's own checks).
"""

from __future__ import annotations

import copy
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan
from sglang_hc.ranks.agreement import Agreement
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from sglang_hc.tiers.ledger import Medium
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.copy_streams import OwnPaceStream
from support.disk_machine import FAILURES, DiskMachine
from support.event_world import SEEN as MIRRORED
from support.event_world import Mirrored
from support.examples import examples
from support.fake_io import FakeIo
from support.fake_store import FakeStoreIo
from support.several_ranks import Group, together
from support.tiers_machine import TiersMachine

SEEN: Counter[str] = Counter()
STORE_FAILURES = [Outcome.DAMAGED, Outcome.IO_ERROR, Outcome.TIMED_OUT]


class Rank(DiskMachine):
    """One rank, with a disk and a remote store. Its rules are called by `Storm`, on all ranks
    alike."""

    disk_forgets = 0.0
    """How often a block leaves the disk by itself, in a step."""

    def __init__(self, agreement: Agreement) -> None:
        self.ranks = agreement
        self.notes = []
        super().__init__()

    def make_copy_stream(self) -> OwnPaceStream:
        self.stream = OwnPaceStream()
        return self.stream

    def make_disk(self, pool: HostPool) -> FakeIo:
        self.io = FakeIo(pool, writes_wait=True)
        return self.io

    def make_store(self, pool: HostPool) -> FakeStoreIo:
        self.store = FakeStoreIo(pool)
        return self.store

    def look(self) -> None:
        """A pass of the queue, and what waiting requests have is restored."""
        super().look()
        TiersMachine.look(self)

    def go_on(self, rng: random.Random, *, faults: bool) -> None:
        """This rank's own I/O and device get some work done, or none."""
        if rng.random() < 0.3:
            return
        for stream in (self.stream, self.stream.opposite()):
            stream.go_on(rng.choice([0, 1, 100]))
        if faults and rng.random() < 0.1:
            self.executor.fail_next = 1
        for _ in range(rng.choice([0, 1, 1, 2, 8])):
            self.executor.step()
        if faults and rng.random() < 0.05:
            self.io.lose()
            SEEN["lost"] += 1
        elif faults and rng.random() < 0.2:
            self.io.back()
        for _ in range(rng.choice([0, 0, 1, 2, 8])):
            bad = faults and rng.random() < 0.2
            self.io.step(rng.choice(FAILURES) if bad else Outcome.OK)
        if rng.random() < self.disk_forgets and self.io.held():
            self.io.evict(min(self.io.held()))
        self.go_on_in_store(rng, faults=faults)

    def go_on_in_store(self, rng: random.Random, *, faults: bool) -> None:
        for _ in range(rng.choice([0, 0, 1, 2, 8])):
            bad = faults and rng.random() < 0.2
            self.store.step(rng.choice(STORE_FAILURES) if bad else Outcome.OK, time.monotonic())
        for _ in range(rng.choice([0, 1, 1, 3])):
            bad = faults and rng.random() < 0.2
            SEEN["lookups"] += bool(self.store.questions)
            self.store.answer(rng.choice(STORE_FAILURES[1:]) if bad else Outcome.OK)
        if faults and rng.random() < 0.1:
            self.store.up = not self.store.up
        if rng.random() < 0.05 and self.store.held():
            self.store.evict(min(self.store.held()))

    def work_on(self) -> None:
        """Called over and over while all ranks wait for each other."""
        for stream in (self.stream, self.stream.opposite()):
            stream.go_on(3)
        self.executor.step()
        self.io.step()
        self.store.step()
        time.sleep(0)

    def pin(self, old: int) -> None:
        salt, tokens = self.spoken[-1 - old % len(self.spoken)]
        self.tiers.retention.pin_if_possible(Prefix(salt, pack_tokens(tokens)), f"s{old}", 0.5)

    def end(self) -> None:
        """Nothing runs or waits any more, and everything is given back."""
        for rid in list(self.fetching):
            self.view.left(rid)
        for rid in list(self.running):
            self.tiers.capture.drop(rid)
        self.tiers.drain()
        self.tiers.drain()  # what was saved just now has gone to disk
        for one in self.waiting.values():
            self.check_early(one)
        self.tiers.restorer.clear()
        self.tiers.check_integrity()
        assert self.tiers.host.staged_slots == 0
        assert all(node.pins == 0 for node in self.tiers.host.tree.nodes())

    def picture(self) -> object:
        """What other ranks must have alike."""
        host = self.tiers.host
        tree = [(n.block_id, n.slot, n.ready, n.pins) for n in host.tree.nodes()]
        records = [(rid, sorted(r.awaits)) for rid, r in self._records()]
        counts = {k: v for k, v in self.tiers.counts().items() if not k.startswith("rank")}
        on_their_way = len(self.disk.coming), len(self.tiers.retention.pins)
        known = list(self.disk._io._far._presence._found.items())
        return tree, host._slots._free, records, counts, on_their_way, known, self.notes

    def what_is_under_way_has_its_slot_for_itself(self) -> None:
        super().what_is_under_way_has_its_slot_for_itself()
        host = self.tiers.host
        pinned = {node.slot for node in host.tree.nodes() if node.pins}
        for move in self.store.moves:
            assert move.slot in pinned if move.write else host.is_staged(move.slot)
        reads = [move.slot for io in (self.io, self.store) for move in io.moves if not move.write]
        assert len(reads) == len(set(reads))

    def _records(self) -> list:
        requests = self.view.requests
        return [(rid, requests[rid]) for rid in sorted(requests)]


class Storm:
    """`count` ranks under one stream of random requests."""

    def __init__(self, seed: int, count: int, *machines: type[Rank]) -> None:
        """machines: what each rank is; of one kind where one is given."""
        self.rng = random.Random(seed)
        self.ranks: list[Rank] = []
        waits = [lambda rank=rank: self.ranks[rank].work_on() for rank in range(count)]
        self.group: Group[Rank] = Group(count, waits.__getitem__)
        kinds = machines if len(machines) == count else (machines or (Rank,)) * count
        self.ranks = [kind(a) for kind, a in zip(kinds, self.group.agreements, strict=True)]
        self.faulty = self.rng.randrange(count)
        forgets = self.rng.choice([0.05, 0.9])
        for rank in self.ranks:
            rank.disk_forgets = forgets

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.go_on()
            self.group.now += self.rng.choice([0.0, 0.001, 0.06])
            patience = self.rng.choice([0.0, 0.05, 10.0])
            self.begin_pass(patience, requests=self.rng.random() < 0.3)
            self.all(lambda r: r.tiers.poll())
            self.all(lambda r: r.look())
            self.action()
            self.compare()
        self.together(lambda r: r.end())
        self.compare()
        for name in MOVED:
            SEEN[name] += self.ranks[0].disk.counters[name]
        SEEN["told"] += self.group.told

    def go_on(self) -> None:
        for index, rank in enumerate(self.ranks):
            rank.go_on(self.rng, faults=index == self.faulty)

    def compare(self) -> None:
        first, *others = [rank.picture() for rank in self.ranks]
        for other in others:
            assert other == first
        for rank in self.ranks:
            rank.every_slot_has_one_owner()
            rank.what_is_under_way_has_its_slot_for_itself()
            rank.notes.clear()

    def action(self) -> None:
        """The same on all ranks."""
        one, rng = self.ranks[0], self.rng
        kind = rng.choice(ACTIONS)
        if kind == "turn":
            more = [rng.randrange(3) for _ in range(rng.randint(1, 90))] * rng.choice([1, 3])
            salt, cut = rng.choice([None, ""]), rng.choice([0, 64, 250])
            chunk, reply = rng.choice([30, 64, 250]), rng.randint(0, 30)
            self.all(lambda r: r.turn(salt, 0, cut, more, chunk, reply, 0, False))
        elif kind == "start":
            more = [rng.randrange(3) for _ in range(rng.randint(1, 90))]
            old, cut = rng.randint(0, 50), rng.randint(0, 200)
            self.all(lambda r: r.begin(None, old, cut, more))
        elif kind == "fetch":
            old, cut = rng.randint(0, 50), rng.choice([64, 130, 200, 250])
            self.all(lambda r: r.fetch(old, cut, 0))
        elif kind == "stop" and one.fetching:
            self.group.now += rng.choice([0.0, 1.0, 6.0])
            self.begin_pass(0.0, requests=True)
            which, cancel = rng.randint(0, 5), rng.random() < 0.3
            self.all(lambda r: r.stop_waiting(which, cancel, 0.0))
        elif kind == "queue" and one.tiers.host.published_blocks:
            old, cut, admit = rng.randint(0, 50), rng.choice([64, 200]), rng.random() < 0.5
            self.all(lambda r: r.queue(old, cut, [1], 0, 1, admit))
        elif kind == "leave" and one.waiting:
            which, abort = rng.randint(0, 5), rng.random() < 0.3
            self.all(lambda r: r.leave(which, abort))
        elif kind == "evict":
            count = rng.randint(1, 4)
            self.all(lambda r: r.evict(count))
        elif kind == "pin":
            old = rng.randint(0, 50)
            self.all(lambda r: r.pin(old))
        elif kind == "forget" and not one.running:
            self.together(lambda r: r.tiers.clear())
            if rng.random() < 0.1:
                self.together(lambda r: r.disk.erase(None, (), lambda _: None))
                SEEN["emptied"] += 1
            old = rng.randint(0, 3)
            self.all(lambda r: r.fetch(old, 250, 0))
        elif one.running:
            which, step, drop = rng.randint(0, 5), rng.randint(1, 130), rng.random() < 0.3
            self.all(lambda r: r.compute(which, step))
            self.all(lambda r: r.keep(which, step % 2 == 0))
            if rng.random() < 0.3:
                self.all(lambda r: r.finish(which, drop))

    def begin_pass(self, patience: float, *, requests: bool) -> None:
        self.group.begin_pass(patience, requests=requests)

    def all(self, call: Callable[[Rank], object]) -> None:
        for rank in self.ranks:
            call(rank)

    def together(self, call: Callable[[Rank], object]) -> None:
        """Ranks that wait for each other."""
        together([partial(call, rank) for rank in self.ranks])


ACTIONS = ["turn", "turn", "turn", "start", "fetch", "fetch", "stop", "stop", "queue", "leave",
           "evict", "evict", "pin", "forget", "forget", "run", "run"]  # fmt: skip

MOVED = [f"{tier}_{end}_blocks" for tier in ("disk", "remote") for end in ("saved", "loaded")]

SEEDS = st.integers(0, 2**32)


class HiddenRank(Rank):
    plan = LayerPlan(0, 2, 0)


class RingRank(Rank):
    """KV goes straight, through a ring: its ends are points in the order, without an operation."""

    ring = 8192


class Stage(Rank):
    """Restores nothing before a request's turn."""

    def look(self) -> None:
        DiskMachine.look(self)


class FirstStage(Stage):
    plan = LayerPlan(0, 2, 1)


class LaterStage(Stage):
    plan = LayerPlan(0, 1, 2)


class Pipeline(Storm):
    """Two stages. The later one handles a pass when the first has begun and handled the next one;
    before they wait for each other it catches up, because no batch is between them then."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, 2, FirstStage, LaterStage)
        for rank in self.ranks:
            rank.tiers.host.tree.fingerprint = b"of both stages"
        self.later: deque[list[Callable[[], object]]] = deque()
        self.wanted: deque[object] = deque()
        self.today: list[Callable[[], object]] = []

    def begin_pass(self, patience: float, *, requests: bool) -> None:
        first, second = self.group.agreements
        first.begin_pass()
        decisions = first.decisions(patience, requests=requests)
        self.today.append(second.begin_pass)
        if decisions is not None:
            self.group.told += 1
            first.apply(decisions)
            self.today.append(partial(second.apply, decisions))

    def all(self, call: Callable[[Rank], object]) -> None:
        first, second = self.ranks
        call(first)
        self.today.append(partial(call, second))

    def compare(self) -> None:
        """The first stage is through with a pass; the second handles the one before."""
        first = self.ranks[0]
        self.wanted.append(copy.deepcopy(first.picture()))
        first.notes.clear()
        self.later.append(self.today)
        self.today = []
        if len(self.later) > 1:
            self.catch_up()

    def catch_up(self) -> None:
        second = self.ranks[1]
        for call in self.later.popleft():
            call()
        assert second.picture() == self.wanted.popleft()
        second.notes.clear()
        for rank in self.ranks:
            rank.every_slot_has_one_owner()
            rank.what_is_under_way_has_its_slot_for_itself()

    def together(self, call: Callable[[Rank], object]) -> None:
        while self.later:
            self.catch_up()
        for late in self.today:
            late()
        self.today = []
        super().together(call)


class MirroredRank(Mirrored, Rank):
    def below(self) -> dict[Medium, set[bytes]]:
        near, far = self.disk._io._near._store, self.disk._io._far
        return {Medium.DISK: set(near._known), Medium.EXTERNAL: set(far._told.there)}


class MirroredStorm(Storm):
    def compare(self) -> None:
        super().compare()
        for rank in self.ranks:
            rank.tiers.residence.poll()
            rank.agree()


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_a_mirror_of_each_rank_is_what_all_hold(seed: int) -> None:
    MirroredStorm(seed, 2, MirroredRank).run(25)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_a_stage_that_is_a_pass_behind_decides_alike(seed: int) -> None:
    Pipeline(seed).run(25)


@pytest.mark.parametrize("machine", [Rank, HiddenRank, RingRank])
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_ranks_decide_alike(machine: type[Rank], seed: int) -> None:
    Storm(seed, 2, machine).run(25)


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_three_ranks_decide_alike(seed: int) -> None:
    Storm(seed, 3).run(25)


@pytest.mark.slow
@pytest.mark.parametrize("storm", [partial(Storm, count=2), Pipeline], ids=["ranks", "stages"])
@settings(max_examples=1000, deadline=None)
@given(seed=SEEDS)
def test_ranks_decide_alike_in_a_thousand_storms(storm: Callable[[int], Storm], seed: int) -> None:
    storm(seed).run(30)


def test_the_storms_did_something() -> None:
    """Runs last: ranks that do nothing decide alike."""
    assert all(SEEN[name] > 0 for name in (*MOVED, "lost", "told", "lookups", "emptied")), SEEN
    assert MIRRORED["DISK"] > 0 and MIRRORED["EXTERNAL"] > 0
