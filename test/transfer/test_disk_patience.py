"""Reads from disk that are asked about first, and waited for only as long as they can save."""

from __future__ import annotations

from sglang_hc.transfer.disk_tier import PATIENCE
from support.subjects import ServerSubject, tokens_of

WORD = "abcd"


def evicted() -> ServerSubject:
    """A server whose four blocks of WORD are on disk only; a request for them waits."""
    subject = ServerSubject("lru", "queue", host_slots=8)
    subject.serve(WORD)
    subject.serve("stuvwxyz")
    assert not {"a", "ab", WORD} & subject.in_host()
    subject.order.append(WORD)
    return subject


def ready(subject: ServerSubject) -> bool:
    return subject.queue.ready(WORD, subject._waiting)


def test_a_read_that_is_not_worth_it_is_not_begun() -> None:
    subject = evicted()
    asked = []

    def worth(host: int, disk: int, context: int, new: int, ahead: bool) -> bool:
        asked.append((host, disk, context, new, ahead))
        return False

    subject.disk.worth = worth
    free = subject.host.free_slots
    assert ready(subject), "nothing to wait for"
    assert asked == [(0, 256, 0, 1, False)]
    assert subject.io.started == [] and subject.host.free_slots == free
    assert subject.disk.counters["prefetch_not_worth"] == 1


def test_what_the_device_and_the_host_tier_have_is_told() -> None:
    subject = evicted()
    subject.serve("a")
    asked = []
    subject.disk.worth = lambda *question: bool(asked.append(question))
    tokens = tokens_of(WORD)
    subject.disk.prefetch("r", None, tokens, 10)
    subject.disk.prefetch("r", None, tokens, 200, ahead=True)
    assert asked == [(54, 192, 10, 1, False), (0, 56, 200, 1, True)]


def test_a_request_waits_from_its_turn_on_for_as_long_as_it_saves() -> None:
    subject = evicted()
    subject.disk.patience = lambda host, disk, context, new: disk / 128
    subject.disk.prefetch(WORD, None, tokens_of(WORD), 0, ahead=True)
    subject._now += 99.0  # others are served: that costs this request nothing
    assert not ready(subject)
    subject._now += 1.9
    assert not ready(subject)
    subject._now += 0.2
    assert ready(subject)
    assert subject.disk.counters["prefetch_late"] == 1
    assert subject.admit() == 0, "nothing had arrived"
    subject.arrive_all()
    assert WORD in subject.in_host()
    assert subject.disk.busy == 0


def test_nobody_waits_longer_than_the_bound() -> None:
    subject = evicted()
    subject.disk.patience = lambda host, disk, context, new: float("inf")
    assert not ready(subject)
    subject._now += PATIENCE - 0.1
    assert not ready(subject)
    subject._now += 0.2
    assert ready(subject)


def test_what_arrives_in_time_is_used() -> None:
    subject = evicted()
    subject.disk.patience = lambda host, disk, context, new: 1.0
    assert not ready(subject)
    subject.arrive_all()
    assert ready(subject)
    assert subject.disk.take_loaded(WORD) == 256
    assert subject.disk.counters["prefetch_late"] == 0
