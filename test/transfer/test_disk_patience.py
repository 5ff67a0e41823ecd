"""Reads from disk that are weighed first, and waited for only as long as they can save."""

from __future__ import annotations

from sglang_hc.policy.fetches import UnknownCosts
from sglang_hc.policy.prefetch import MAX_FETCHES, PATIENCE
from support.subjects import ServerSubject

WORD = "abcd"


class Costs(UnknownCosts):
    """What is asked is noted; each fetched token saves so much."""

    def __init__(self, block_seconds: float = 0.0, per_token: float = 1.0) -> None:
        self.block_seconds = block_seconds
        self.per_token = per_token
        self.asked: list[tuple[int, int, int, int]] = []

    def saved_seconds(self, host: int, fetched: int, context: int, new: int) -> float:
        self.asked.append((host, fetched, context, new))
        return fetched * self.per_token


def evicted(costs: Costs, prefetch: str = "queue") -> ServerSubject:
    """A server whose four blocks of WORD are on disk only; a request for them waits."""
    subject = ServerSubject("lru", prefetch, 8, costs)
    subject.serve(WORD)
    subject.serve("stuvwxyz")
    assert not {"a", "ab", WORD} & subject.in_host()
    subject.order.append(WORD)
    return subject


def ready(subject: ServerSubject) -> bool:
    return subject.ready(WORD)[0]


def test_a_read_that_is_not_worth_it_is_not_begun() -> None:
    costs = Costs(per_token=-1.0)
    subject = evicted(costs)
    free = subject.host.free_slots
    assert ready(subject), "nothing to wait for"
    assert set(costs.asked) == {(0, 256, 0, 1)}
    assert subject.io.started == [] and subject.host.free_slots == free
    for _ in range(5):
        assert ready(subject)
    assert subject.queue.counters["prefetch_not_worth"] == 1, "weighed once"


def test_what_the_device_and_the_host_tier_have_is_told() -> None:
    costs = Costs()
    subject = evicted(costs)
    subject.serve("a")
    asked = subject._waiting

    subject._waiting = lambda word: asked(word)._replace(on_device=10)
    assert not ready(subject)
    assert (54, 192, 10, 1) in costs.asked


def test_nothing_is_read_for_what_the_device_has() -> None:
    subject = evicted(Costs())
    asked = subject._waiting
    subject._waiting = lambda word: asked(word)._replace(on_device=256)
    assert subject.look() == [] and ready(subject)


def test_a_request_waits_from_its_turn_on_for_as_long_as_it_saves() -> None:
    subject = evicted(Costs(per_token=1 / 128))
    assert subject.look() == ["a", "ab", "abc", "abcd"]
    subject._now += 99.0  # others are served: that costs this request nothing
    assert not ready(subject)
    subject._now += 0.9
    assert not ready(subject)
    assert ready(subject)
    assert subject.queue.counters["prefetch_late"] == 1
    assert subject.admit() == 0, "nothing had arrived"
    subject.arrive_all()
    assert subject.disk.busy == 0
    assert subject.queue.take_loaded(WORD) == 0


def test_nobody_waits_longer_than_the_bound() -> None:
    subject = evicted(Costs())
    assert not ready(subject)
    subject._now += PATIENCE - 1.1
    assert not ready(subject)
    assert ready(subject)


def test_what_arrives_in_time_is_used() -> None:
    subject = evicted(Costs(per_token=1 / 128))
    assert not ready(subject)
    subject.arrive_all()
    assert ready(subject)
    assert subject.queue.take_loaded(WORD) == 256
    assert subject.queue.counters["prefetch_late"] == 0


def test_what_leaves_again_is_fetched_again_a_few_times() -> None:
    """Under lru, what was read for one request leaves for the next."""
    subject = evicted(Costs(), prefetch="on-arrival")
    subject.order.remove(WORD)
    subject.enqueue(WORD)
    fetched = 0
    while not ready(subject):
        subject.arrive_all()
        assert WORD in subject.in_host()
        subject.serve("stuvwxyz"[::-1] if fetched % 2 else "stuvwxyz")
        assert WORD not in subject.in_host()
        fetched += 1
    assert fetched == MAX_FETCHES


def test_two_that_need_one_block_wait_for_the_same_read() -> None:
    subject = evicted(Costs())
    other = "abx"
    subject.enqueue(other)
    started = subject.ready(WORD)[1]
    assert started == ["a", "ab", "abc", "abcd"]
    assert subject.ready(other) == (False, []), "passed over, and nothing is read twice"
    subject.abort(WORD)
    assert not subject.ready(other)[0], "the read goes on for the one that is left"
    subject.arrive_all()
    assert subject.ready(other) == (True, [])
    assert subject.queue.take_loaded(other) == 128
