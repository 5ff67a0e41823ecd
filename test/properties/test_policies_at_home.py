"""One suite for the policies where they serve and where they are simulated.

Every test runs on the server's tiers and on the simulator's; the last ones run both side by side
through the same random history and ask for the same blocks in host memory, and the same fetches in
the same order, after every step.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from support.examples import examples
from support.rates import ConstantRates, UnknownCosts
from support.subjects import SUBJECTS, Subject

Make = Callable[..., Subject]


@pytest.fixture(params=list(SUBJECTS))
def make(request: pytest.FixtureRequest) -> Make:
    def build(eviction: str = "queue", prefetch: str = "off", host_slots: int = 4) -> Subject:
        return SUBJECTS[request.param](eviction, prefetch, host_slots)

    return build


def test_everything_is_written_once_and_found(make: Make) -> None:
    subject = make()
    assert [subject.serve("ab"), subject.serve("ac"), subject.serve("ab")] == [0, 1, 2]
    assert subject.in_host() == subject.on_disk() == {"a", "ab", "ac"}


# -- eviction -------------------------------------------------------------------------------------


def test_outside_the_window_age_decides(make: Make) -> None:
    subject = make()
    for word in "abcd":
        subject.serve(word)
    subject.serve("b")
    left = []
    for newcomer in "0123":
        before = subject.in_host()
        subject.serve(newcomer)
        left += before - subject.in_host()
    assert left == ["a", "c", "d", "b"]


@pytest.mark.parametrize(("eviction", "stays"), [("lru", False), ("queue", True)])
def test_over_a_loop_that_does_not_fit_a_part_stays(make: Make, eviction: str, stays: bool) -> None:
    subject = make(eviction)
    hits = [sum(subject.serve(word) for word in "abcdef") for _ in range(30)]
    assert (sum(hits[-10:]) >= 20) is stays  # 30 to 40 is the best that 4 slots for 6 can do


# -- prefetch -------------------------------------------------------------------------------------


def on_disk_only(make: Make, prefetch: str, *words: str, host_slots: int = 4) -> Subject:
    """These words were served, then evicted from host memory by words that no request waits for."""
    subject = make("queue", prefetch, host_slots)
    for word in words:
        subject.serve(word)
    for number in range(host_slots):
        subject.serve(str(number))
    assert not subject.in_host() & set(words)
    return subject


def test_a_path_comes_from_its_start_and_only_what_is_missing(make: Make) -> None:
    subject = on_disk_only(make, "queue", "abc", host_slots=6)
    subject.serve("a")
    subject.enqueue("abcd")
    assert subject.look() == ["ab", "abc"]
    subject.arrive_all()
    assert subject.admit() == 3


def test_what_is_needed_sooner_does_not_make_room(make: Make) -> None:
    subject = on_disk_only(make, "queue", "a", "b", "c", host_slots=2)
    for word in "abc":
        subject.enqueue(word)
    for _ in range(3):
        subject.look()
        subject.arrive_all()
    assert subject.in_host() == {"a", "b"}
    assert subject.admit() == 1
    subject.look()
    subject.arrive_all()
    assert subject.in_host() == {"b", "c"}


@pytest.mark.parametrize("prefetch", ["queue", "on-arrival"])
def test_an_aborted_request_is_not_fetched_for(make: Make, prefetch: str) -> None:
    subject = on_disk_only(make, prefetch, "a", "b")
    subject.enqueue("a")
    subject.enqueue("b")
    subject.abort("a")
    assert subject.look() == ["b"]


# -- side by side ---------------------------------------------------------------------------------

WORDS = ["a", "ab", "abc", "b", "ba", "c", "cd", "cde", "e"]
RATES = {
    "nothing measured": UnknownCosts(),
    "a fast disk": ConstantRates(0.1, BLOCK_TOKENS / 10),
    "a disk as slow as recomputing": ConstantRates(1.0, BLOCK_TOKENS),
    "a slow disk": ConstantRates(2.0, BLOCK_TOKENS),
    "a slow disk that is met": ConstantRates(2.0, BLOCK_TOKENS, meets=True),
}
ACTIONS = ["serve", "enqueue", "enqueue", "admit", "abort", "look", "arrive", "ask", "insist"]
fetch_steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(WORDS)), max_size=80)


def fetch_step(subject: Subject, action: str, word: str) -> object:
    """One thing that happens. Returns everything that the subject answers."""
    waiting = word in subject.order
    if action == "serve" and not waiting:
        return subject.serve(word)
    if action == "enqueue" and not waiting:
        return subject.enqueue(word)
    if action == "abort" and waiting:
        return subject.abort(word)
    if action == "ask" and waiting:
        return subject.ready(word)
    if action == "insist" and waiting:  # longer than anybody has patience
        return [subject.ready(word) for _ in range(7)]
    if action == "admit" and subject.order:
        looked = subject.look()  # a pass begins so
        ready, started = subject.ready(subject.order[0])
        return looked, started, subject.admit() if ready else None
    if action == "arrive":
        return subject.arrive_all()
    return subject.look()


@settings(deadline=None, max_examples=examples(150))
@given(history=fetch_steps)
def test_needed_blocks_stay_while_others_could_leave(history: list) -> None:
    for kind in SUBJECTS.values():
        subject = kind("queue", "queue", 5)
        for action, word in history:
            subject.look()
            needed = {w[: i + 1] for w in subject.order for i in range(len(w))}
            before = subject.in_host()
            fetch_step(subject, action, word)
            lost = (before & needed) - subject.in_host()
            # Nothing needed leaves for somebody who did not wait while anything else is there.
            if lost and action == "serve":
                own = {word[: end + 1] for end in range(len(word))}
                assert subject.in_host() <= needed | own


def run_both(rates: str, eviction: str, prefetch: str, history: list) -> Counter[str]:
    """The same history on both, equal after every step. Returns what the prefetchers counted."""
    server, simulator = (kind(eviction, prefetch, 4, RATES[rates]) for kind in SUBJECTS.values())
    for subject in (server, simulator):
        for word in WORDS:
            subject.serve(word)
    for action, word in history:
        assert fetch_step(server, action, word) == fetch_step(simulator, action, word)
        assert server.in_host() == simulator.in_host()
        assert len(server.coming) == len(simulator.coming)
        assert server.counters == simulator.counters
        server.requests.check_integrity()
    return server.counters


WAYS = pytest.mark.parametrize(
    ("rates", "eviction", "prefetch"),
    [*itertools.product(RATES, ["queue", "lru"], ["queue", "on-arrival"])],
)


@WAYS
@settings(deadline=None, max_examples=examples(30))
@given(history=fetch_steps)
def test_both_fetch_the_same_in_the_same_order(
    rates: str, eviction: str, prefetch: str, history: list
) -> None:
    run_both(rates, eviction, prefetch, history)


@WAYS
def test_both_fetch_the_same_in_a_long_run(rates: str, eviction: str, prefetch: str) -> None:
    """Long enough for much to be fetched, so that the property above does not hold trivially."""
    rng = random.Random(f"{rates} {eviction} {prefetch}")
    history = [(rng.choice(ACTIONS), rng.choice(WORDS)) for _ in range(1000)]
    counters = run_both(rates, eviction, prefetch, history)
    assert counters["prefetches"] > 30 or counters["meetings"] > 30
    assert (counters["meetings"] > 0) == ("met" in rates)
    assert counters["prefetch_late"] > 3 or counters["meetings"]
    assert (counters["prefetch_not_worth"] > 3) == ("slow" in rates)
