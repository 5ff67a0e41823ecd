"""Requests of histories that begin alike wait, meet theirs, are aborted and come back in any order.

Reads end in any order and in any way, blocks leave host memory, and the costs say anything. Every
request is served in bounded time, and at the end nothing is left of any of them.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.meeting import History, Split
from sglang_hc.queue.meeting import Action
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import BLOCK_BYTES, Prefix
from support.examples import examples
from support.host import keep, tokens_of
from support.rates import ConstantRates, UnknownCosts
from support.subjects import SUBJECTS, ServerSubject, SimulatorSubject

WORDS = ("abcdefgh", "abcdefgx", "abcd", "abxyz", "mnopqrst", "mnopq", "mno")
OUTCOMES = [Outcome.OK] * 6 + [Outcome.DAMAGED, Outcome.IO_ERROR]
STEPS = 80
MOST_PASSES = 40
"""A second each: a meeting and some fetches are waited for, each within bounds."""


class AnySplit(UnknownCosts):
    """Costs that say anything of where a history should be met."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng
        self._block = rng.choice([0.0, 0.5, 3.0])
        self._token = rng.choice([0.1, 1.0, 10.0]) / BLOCK_TOKENS

    def block_seconds(self, tier: SourceTier) -> float:
        return self._block

    def saved_seconds(self, host: int, fetched: int, context: int, new: int) -> float:
        return fetched * self._token

    def split(self, history: History, decoding: int, can_restore_early: bool) -> Split:
        rng = self._rng
        coming = sum(span.tokens for span in history.coming) // BLOCK_TOKENS
        head = rng.randint(0, coming)
        early = rng.random() < 0.5
        return Split(head * BLOCK_TOKENS, 8 * rng.random(), 1.0, early)


class Scheduler:
    """Admits one request at a time, and computes its prompt in chunks."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        mode = rng.choice(["queue", "on-arrival"])
        self.tiers = ServerSubject("queue", mode, rng.randint(4, 16), AnySplit(rng))
        for word in WORDS:
            self.tiers.serve(word)
        self.running: str | None = None
        self.head = 0

    def enqueue(self) -> None:
        words = [word for word in WORDS if word not in (*self.tiers.order, self.running)]
        if words:
            self.tiers.enqueue(self.rng.choice(words))

    def look(self) -> None:
        self.tiers.look()

    def ask(self) -> None:
        order = self.tiers.order
        if not order or self.running:
            return
        word = self.rng.choice(order[:3])
        if self.tiers.ready(word)[0]:
            order.remove(word)
            self.running = word
            self.head = self.tiers.host.tree.match(Prefix(None, tokens_of(word))).tokens
            self.compute(BLOCK_TOKENS)  # a first chunk comes before anything is restored
            self.tiers.queue.on_schedule_step(order)

    def read(self) -> None:
        moves = self.tiers.io.moves
        if moves:
            moves.rotate(-self.rng.randrange(len(moves)))
            self.tiers.io.step(self.rng.choice(OUTCOMES))
            self.tiers.disk.poll()

    def abort(self) -> None:
        if self.tiers.order:
            self.tiers.abort(self.rng.choice(self.tiers.order))

    def evict(self) -> None:
        self.tiers.host.evict(2, self.tiers.now)

    def clear(self) -> None:
        if self.rng.random() < 0.1:  # the weights change
            self.tiers.arrive_all()
            self.tiers.disk.coming.give_up_all()
            self.tiers.host.clear()

    def go_on(self) -> None:
        if self.running is None:
            return
        meetings, word = self.tiers.queue.meetings, self.running
        self.tiers.now += 0.5
        meetings.decoding = self.rng.randint(0, 1)
        step = meetings.next(word, self.head)
        if step.action is Action.COMPUTE:
            self.compute(step.tokens)
        elif step.action is Action.RESTORE:
            nodes = meetings.join(word, self.head)
            if nodes is not None:
                assert all(node.ready for node in nodes)
        if meetings.of(word) is None or self.head >= len(word) * BLOCK_TOKENS:
            self.tiers.queue.finished(word, len(word))
            self.running = None

    def compute(self, tokens: int) -> None:
        assert self.running is not None
        self.head = min(self.head + tokens, len(self.running) * BLOCK_TOKENS)
        kept = tokens_of(self.running)[: self.head // BLOCK_TOKENS * BLOCK_BYTES]
        for node in keep(self.tiers.host, kept, now=self.tiers.now):
            self.tiers.disk.write_through(node)

    def check(self) -> None:
        self.tiers.host.check_integrity()
        self.tiers.queue.window.check_integrity()
        self.tiers.requests.check_integrity()

    def end(self) -> None:
        """Everybody is ready at last, and leaves."""
        while self.running:
            self.go_on()
            self.read()
        for word in tuple(self.tiers.order):
            assert any(self.tiers.ready(word)[0] for _ in range(MOST_PASSES))
            self.tiers.abort(word)
        self.look()
        self.tiers.arrive_all()
        self.check()
        host = self.tiers.host
        assert host.staged_slots == 0 and not self.tiers.coming and not len(self.tiers.requests)
        assert all(node.pins == 0 for node in host.tree.nodes())
        assert not self.tiers.queue.meetings.under_way


@settings(max_examples=examples(300), deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_happens_everybody_is_served_and_nothing_is_left(rng: Random) -> None:
    scheduler = Scheduler(rng)
    often = [scheduler.look, scheduler.ask, *[scheduler.read, scheduler.go_on] * 2]
    rare = [scheduler.enqueue, scheduler.abort, scheduler.evict, scheduler.clear]
    for _ in range(STEPS):
        rng.choice(often + rare)()
        scheduler.check()
    scheduler.end()


@pytest.mark.parametrize("home", list(SUBJECTS))
def test_what_has_come_of_a_meeting_is_not_being_read(home: str) -> None:
    """Until both ends met the simulator timed the fetches of others behind all of it."""
    costs = ConstantRates(1.0, float(BLOCK_TOKENS), meets=True)
    subject = SUBJECTS[home]("queue", "queue", 8, costs)
    for word in ("abcdefgh", "stuvwxyz"):
        subject.serve(word)
    subject.enqueue("abcdefgh")
    subject.look()
    assert subject.counters["meetings"] == 1 and subject.reading() == 4
    subject.arrive_all()
    assert subject.reading() == 0 and len(subject.coming) == 4


def test_an_admission_loads_nothing_that_is_on_its_way_for_another() -> None:
    """Where the device had the first blocks, the simulator looked at the others alone. It began to
    read the first ones a second time, and ended with a KeyError."""
    subject = SimulatorSubject("lru", "queue", 20, device_slots=8)
    for word in ("abcdefgh", "abcdmnop", "stuvwxyz", "abcd"):
        subject.serve(word)
    subject.host.clear()
    for word in ("abcdmnop", "abcdefgh"):
        subject.enqueue(word)
    assert subject.ready("abcdmnop")[1][:1] == ["a"]
    subject.admit_loading("abcdefgh")
    subject.arrive_all()
    subject.host.check_integrity()
