"""When a disk or a store that keeps failing is left alone, and for how long."""

from __future__ import annotations

from sglang_hc.store.circuit_breaker import CircuitBreaker
from support.clock import Clock


def test_eight_failures_in_a_row_begin_a_pause_of_five_seconds() -> None:
    clock = Clock(100.0)
    breaker = CircuitBreaker(clock)
    for _ in range(2):
        assert [breaker.failed() for _ in range(7)] == [False] * 7 and breaker.allows()
        assert not breaker.succeeded(), "there was no pause"
    assert [breaker.failed() for _ in range(8)] == [False] * 7 + [True]
    clock.now += 4.99
    assert not breaker.allows() and not breaker.failed()
    clock.now += 0.01
    assert breaker.allows()


def test_pauses_double_up_to_five_minutes_and_end_with_a_success() -> None:
    clock = Clock(100.0)
    breaker = CircuitBreaker(clock)
    while not breaker.failed():
        pass
    for pause in (5, 10, 20, 40, 80, 160, 300, 300):
        clock.now += pause - 0.01
        assert not breaker.allows()
        clock.now += 0.01
        assert breaker.allows() and breaker.failed()
    clock.now += 300
    assert breaker.succeeded() and breaker.allows()
    assert [breaker.failed() for _ in range(8)] == [False] * 7 + [True]
    clock.now += 5
    assert breaker.allows()
