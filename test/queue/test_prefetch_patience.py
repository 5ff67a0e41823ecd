"""Reads from disk that are weighed first, and waited for only as long as they can save."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.tries import Tries
from sglang_hc.queue.prefetch import TRY_BLOCKS
from support.host import identities, tokens_of
from support.profiles import cost_model
from support.rates import UnknownCosts
from support.subjects import ServerSubject

WORD = "abcd"


class Costs(UnknownCosts):
    """Notes what it is asked; each fetched token saves `per_token` seconds."""

    def __init__(self, block_seconds: float = 0.0, per_token: float = 1.0) -> None:
        super().__init__()
        self.seconds_per_block = block_seconds
        self.per_token = per_token
        self.asked: list[tuple[int, int, int, int]] = []

    def block_seconds(self, tier: SourceTier) -> float:
        return self.seconds_per_block

    def saved_seconds(self, host: int, fetched: int, context: int, new: int) -> float:
        self.asked.append((host, fetched, context, new))
        return fetched * self.per_token


def evicted(costs: Costs, prefetch: str = "queue") -> ServerSubject:
    """A server whose four blocks of WORD are on disk only; a request for them waits."""
    subject = ServerSubject("lru", prefetch, 8, costs)
    subject.serve(WORD)
    subject.serve("stuvwxyz")
    assert not {"a", "ab", WORD} & subject.in_host()
    subject.enqueue(WORD)
    return subject


def ready(subject: ServerSubject) -> bool:
    return subject.ready(WORD)[0]


def test_a_read_that_is_not_worth_it_is_not_begun() -> None:
    costs = Costs(per_token=-1.0)
    subject = evicted(costs)
    free = subject.host.free_slots
    assert ready(subject), "nothing to wait for"
    assert set(costs.asked) == {(0, 256, 0, 1)}
    assert subject.io.begun == [] and subject.host.free_slots == free
    for _ in range(5):
        assert ready(subject)
    assert subject.queue.counters["prefetch_not_worth"] == 1, "weighed once"


def test_what_the_device_and_the_host_tier_have_is_told() -> None:
    costs = Costs()
    subject = evicted(costs)
    subject.serve("a")
    subject.on_device = 10
    assert not ready(subject)
    assert (54, 192, 10, 1) in costs.asked


def test_nothing_is_read_for_what_the_device_has() -> None:
    subject = evicted(Costs())
    subject.on_device = 256
    assert subject.look() == [] and ready(subject)


def test_a_request_waits_from_its_turn_on_for_as_long_as_it_saves() -> None:
    subject = evicted(Costs(per_token=1 / 128))
    assert subject.look() == ["a", "ab", "abc", "abcd"]
    subject.now += 99.0  # others are served: that costs this request nothing
    assert not ready(subject)
    subject.now += 0.9
    assert not ready(subject)
    assert ready(subject)
    assert subject.queue.counters["prefetch_late"] == 1
    assert subject.admit() == 0, "nothing had arrived"
    subject.arrive_all()
    assert subject.disk.busy == 0
    assert subject.queue.take_loaded(WORD) == 0


def test_what_arrives_in_time_is_used() -> None:
    subject = evicted(Costs(per_token=1 / 128))
    assert not ready(subject)
    subject.arrive_all()
    assert ready(subject)
    assert subject.queue.take_loaded(WORD) == 256
    assert subject.queue.counters["prefetch_late"] == 0


def test_a_disk_and_a_store_that_read_for_one_request_are_timed_apart() -> None:
    seen: list[tuple[SourceTier, int, float]] = []
    subject = ServerSubject("lru", "queue", 8, Costs(), lambda *read: seen.append(read))
    subject.serve(WORD)
    subject.serve("stuvwxyz")
    subject.enqueue(WORD)
    subject.io.far = {identities(tokens_of(WORD))[1]}
    assert not ready(subject)
    began = subject.now
    reading = [subject.disk.reading(tier) for tier in (SourceTier.DISK, SourceTier.REMOTE)]
    assert reading == [3, 1]
    for at in (1.0, 7.0, 2.0, 3.0):
        subject.io.step(at=began + at)
    subject.disk.poll()
    assert sorted(seen, key=lambda read: read[1]) == [
        (SourceTier.REMOTE, 1, 7.0), (SourceTier.DISK, 3, 3.0)
    ]  # fmt: skip
    assert ready(subject)


class Doubted(Costs):
    """No fetch is worth it, but fetches are tried."""

    tries: Tries | None = None

    def __init__(self, try_for: float) -> None:
        super().__init__(per_token=-1.0)
        self.tries = Tries()
        self.try_for = try_for

    def try_seconds(self, context: int, new: int) -> float:
        self.asked.append((0, 0, context, new))
        return self.try_for


def test_a_fetch_that_is_not_worth_it_is_tried_and_waited_for() -> None:
    costs = Doubted(5.0)
    subject = evicted(costs)
    done, started = subject.ready(WORD)
    assert not done and started == ["a", "ab", "abc", "abcd"][:TRY_BLOCKS]
    assert (0, 0, 0, 256) in costs.asked, "as if all of it had to be computed"
    subject.arrive_all()
    assert ready(subject)
    assert subject.queue.counters["prefetch_tries"] == 1
    assert subject.queue.counters["prefetch_not_worth"] == 1
    assert subject.admit() == 4


def test_a_long_history_is_tried_in_part() -> None:
    subject = ServerSubject("lru", "queue", 8, Doubted(5.0))
    subject.serve("abcdefg")
    subject.serve("stuvwxyz")
    subject.enqueue("abcdefg")
    assert subject.ready("abcdefg") == (False, ["a", "ab", "abc", "abcd"])
    subject.arrive_all()
    assert subject.ready("abcdefg") == (True, []), "the rest is not worth it either"


def test_a_try_is_waited_for_no_longer_than_the_prefill_takes() -> None:
    subject = evicted(Doubted(2.5))
    assert not ready(subject)
    assert not ready(subject)
    assert not ready(subject)
    assert ready(subject)
    assert subject.queue.counters["prefetch_late"] == 1


@pytest.mark.parametrize("wrong", [10.0, 1.0, 0.1])
def test_a_disk_is_read_within_fifty_requests_whatever_its_profile_says(wrong: float) -> None:
    """Recomputing a token takes 10 ms, reading it 2 ms; the profile is wrong by a factor."""
    hits, counters = fifty_requests(2e-3, wrong * 2e-3)
    assert hits[-5:] == [3] * 5
    assert (counters["prefetch_tries"] > 0) == (wrong == 10.0)
    assert (min(hits) == 0) == (wrong == 10.0)


def test_a_disk_slower_than_recomputing_is_left_alone_but_for_tries() -> None:
    """Reading takes 40 ms a token. The profile says so, or that it takes 4 ms."""
    for profile in (4e-2, 4e-3):
        hits, counters = fifty_requests(4e-2, profile)
        assert hits[-5:].count(0) >= 4
        assert counters["prefetch_tries"] <= 7


def fifty_requests(true: float, profile: float) -> tuple[list[int], Counter[str]]:
    """Blocks hit by each of 50 requests for three blocks that are on disk only; seconds to read a
    token on this machine, and by its profile."""
    costs = cost_model(host=1e-6, disk=profile + 1e-6, prefill=1e-2)
    choice = RestorePlanner(costs, LayerPlan(0, 0, 1), False, Counter())
    seen = partial(costs.observe_read, LayerPlan(0, 0, 1))
    subject = ServerSubject("lru", "queue", 8, choice, seen, can_meet=False)
    words = [chr(code) + "yz" for code in range(ord("A"), ord("A") + 50)]
    for word in words:
        subject.serve(word)
    hits = []
    for word in words:
        subject.enqueue(word)
        done, started = subject.ready(word)
        if not done:
            subject.io.end_all(at=subject.now + 64 * true * len(started))
            subject.disk.poll()
            while not ready_of(subject, word):
                continue
        hits.append(subject.admit())
    return hits, subject.queue.counters


def ready_of(subject: ServerSubject, word: str) -> bool:
    return subject.ready(word)[0]


def test_a_request_that_is_looked_at_again_is_one_refusal() -> None:
    costs = Doubted(5.0)
    costs.tries.tried()  # one refusal is left until the next try
    subject = evicted(costs)
    assert subject.look() == []
    assert ready(subject), "the same request is not tried at its turn"
    assert subject.queue.counters["prefetch_tries"] == 0
    assert costs.tries.due
