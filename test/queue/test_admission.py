"""Nobody starves: the scheduler's loop over QueueView and a disk that is slow and failing."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.queue.admission import ARRANGED, ON_THE_WAY, Admission
from sglang_hc.queue.prefetch import MAX_FETCHES
from sglang_hc.queue.requests import QueuedPrompt, RequestTable
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import Prefix
from support.examples import examples
from support.fake_io import FakeIo
from support.host import host_queue, identities, keep, tokens_of
from support.subjects import DISK_BLOCKS

BOUND = 3
HOST_SLOTS = 10


class Loop:
    """SGLang's scheduling pass, as far as waiting requests see it."""

    def __init__(self, prefetch: str, ready_first: bool) -> None:
        self.now = 0.0
        self.waiting: list[str] = []
        self.words: dict[str, str] = {}
        self.running: list[str] = []
        self.overtaken: Counter[str] = Counter()
        self.arrivals: list[str] = []
        self.io = FakeIo(capacity=DISK_BLOCKS, clock=lambda: self.now)
        window, self.host, self.disk, self.queue = host_queue(
            HOST_SLOTS, self.io, "queue", prefetch, lambda: self.now, ready_first=ready_first
        )
        self.queue.admission = Admission(window.requests, ready_first=ready_first, bound=BOUND)

    def of(self, rid: str) -> QueuedPrompt:
        return QueuedPrompt(Prefix(None, tokens_of(self.words[rid])), lambda: 0)

    def arrive(self, word: str) -> None:
        rid = f"{len(self.arrivals)}:{word}"
        self.words[rid] = word
        self.arrivals.append(rid)
        self.waiting.append(rid)
        self.queue.arrived(rid, partial(self.of, rid))

    def abort(self, rid: str) -> None:
        self.waiting.remove(rid)
        self.queue.left(rid)
        assert not self.queue.requests.is_fetching(rid)

    def run(self, fits: int) -> list[str]:
        """One pass with room for `fits` requests. Returns those it admitted, in order."""
        self.disk.poll()
        if self.queue.admission.ready_first:
            ticket = self.queue.requests.arrival
            self.waiting[:ARRANGED] = sorted(self.waiting[:ARRANGED], key=ticket)
        self.queue.on_schedule_step(self.waiting)
        for rid in self.running:
            self.finish(rid)
        order = list(self.waiting)
        if self.queue.admission.ready_first:
            costs = self.queue.readiness(order[:ARRANGED])
            head = self.queue.admission.arrange(order[:ARRANGED], costs)
            order = self.waiting = head + order[ARRANGED:]
        asked: list[str] = []
        self.running = []
        for rid in order:
            if len(self.running) == fits:
                break
            asked.append(rid)
            if self.queue.ready(rid):
                self.running.append(rid)
        self.waiting = [rid for rid in self.waiting if rid not in self.running]
        before = self.arrivals if self.queue.admission.ready_first else asked
        place = {rid: number for number, rid in enumerate(before)}
        last = max((place[rid] for rid in self.running), default=-1)
        for rid in self.waiting:
            self.overtaken[rid] += place.get(rid, last) < last
        return self.running

    def finish(self, rid: str) -> None:
        """What the request leaves behind comes into the host tier, as far as there is room."""
        tokens = tokens_of(self.words[rid])
        for node in keep(self.host, tokens, now=self.now):
            self.disk.write_through(node)
        self.disk.poll()
        self.queue.finished(rid, len(self.words[rid]))
        assert not self.queue.requests.is_fetching(rid)

    def fill_disk(self) -> None:
        """Every word of the tests was served before, long ago."""
        for letter in "abcd":
            self.io.hold(identities(tokens_of(letter * 5)))


words = st.builds(
    lambda letter, length: letter * length, st.sampled_from("abcdx"), st.integers(1, 5)
)
events = st.lists(
    st.tuples(
        st.lists(words, max_size=2),  # arrivals
        st.integers(0, 2),  # room
        st.integers(0, 4),  # reads that end
        st.sampled_from([Outcome.OK, Outcome.OK, Outcome.DAMAGED, Outcome.TIMED_OUT]),
        st.floats(0, 0.5),
        st.integers(0, 40),  # whom to abort, sometimes
    ),
    max_size=50,
)


@settings(max_examples=examples(200), deadline=None)
@given(events, st.sampled_from(["queue", "on-arrival", "off"]), st.booleans())
def test_nobody_is_overtaken_more_often_than_the_bound(
    history: list, prefetch: str, ready_first: bool
) -> None:
    loop = Loop(prefetch, ready_first)
    loop.fill_disk()
    for arrivals, fits, ended, outcome, seconds, abort in history:
        for word in arrivals:
            loop.arrive(word)
        if abort < len(loop.waiting):
            loop.abort(loop.waiting[abort])
        loop.run(fits)
        assert max(loop.overtaken.values(), default=0) <= BOUND, loop.overtaken
        for _ in range(ended):
            loop.io.step(outcome)
        loop.now += seconds
        loop.host.check_integrity()
    # Nobody comes any more: the queue drains although the disk answers nothing.
    left = len(loop.waiting)
    for _ in range(2 * (MAX_FETCHES + 2) * left):
        loop.now += 6.0  # longer than a request has patience
        loop.run(1)
    assert not loop.waiting
    assert max(loop.overtaken.values(), default=0) <= BOUND
    assert not any(loop.queue.requests.is_fetching(rid) for rid in loop.arrivals)


def test_the_loop_overtakes_and_bounds_at_all() -> None:
    """The property above would also hold if no request were ever bypassed."""
    most: Counter[bool] = Counter()
    for seed in range(20):
        rng = random.Random(seed)
        for ready_first in (False, True):
            loop = Loop("queue", ready_first)
            loop.fill_disk()
            for _ in range(60):
                if rng.random() < 0.6:
                    loop.arrive(rng.choice("abcdxx") * rng.randint(1, 5))
                loop.run(rng.randint(0, 1))
                loop.now += 0.01
            most[ready_first] = max(most[ready_first], *loop.overtaken.values())
    assert most == {False: BOUND, True: BOUND}


@pytest.mark.parametrize("ready_first", [False, True])
def test_ready_first_serves_what_is_there_before_what_is_on_its_way(ready_first: bool) -> None:
    loop = Loop("queue", ready_first)
    loop.fill_disk()
    for word in ("dd", "ccc", "x"):
        loop.arrive(word)
        loop.run(0)
    loop.io.step()
    loop.io.step()  # "dd" has come, "ccc" has not, of "x" nothing exists
    loop.disk.poll()
    served = [rid for _ in range(2) for rid in loop.run(1)]
    assert served == (["2:x", "0:dd"] if ready_first else ["0:dd", "2:x"])


def test_a_pass_counts_for_those_who_stand_before_whom_it_admits() -> None:
    requests: RequestTable[str] = RequestTable()
    admission: Admission[str] = Admission(requests, bound=2)
    for _ in range(5):
        admission.count("ab", [])
    admission.count("abc", ["b"])
    assert [requests[name].bypassed for name in "abc"] == [1, 0, 0]
    assert not admission.must_admit("a")
    admission.count("ac", ["c"])
    assert admission.must_admit("a")
    requests.left("a")
    assert not admission.must_admit("a")


def test_ready_first_serves_who_is_due_and_then_by_the_cost_of_restoring() -> None:
    requests: RequestTable[str] = RequestTable()
    admission: Admission[str] = Admission(requests, bound=1)
    requests["slow"].bypassed = 1
    coming = {"coming": ON_THE_WAY, "slow": ON_THE_WAY}
    cost = {"disk": 0.9, **coming, "host": 0.1, "new": 0.0, "device": 0.0}
    order = ["slow", "new", "device", "host", "disk", "coming"]
    assert admission.order(list(cost), cost.__getitem__) == order


def test_only_who_was_asked_for_counts_as_admitted() -> None:
    requests: RequestTable[str] = RequestTable()
    admission: Admission[str] = Admission(requests)
    for name in "abc":
        admission.asked(name)
    admission.left("c")
    assert admission.admitted(["b", "c", "d"]) == ["b"]
    assert requests["a"].bypassed == 1
    assert admission.admitted(["a"]) == [], "nobody was asked for in this pass"


def test_a_request_is_due_after_64_bypasses() -> None:
    admission: Admission[str] = Admission(RequestTable())
    for _ in range(63):
        admission.count("ab", ["b"])
    assert not admission.must_admit("a")
    admission.count("ab", ["b"])
    assert admission.must_admit("a")
