"""When a disk or a store that keeps failing is left alone, and for how long."""

from __future__ import annotations

from sglang_hc.store.circuit_breaker import CircuitBreaker
from support.clock import Clock


def test_eight_failures_in_a_row_begin_pauses_that_double_and_end_with_a_success() -> None:
    """From five seconds up to five minutes."""
    clock = Clock(100.0)
    breaker = CircuitBreaker(clock)
    for _ in range(2):
        assert [breaker.failed() for _ in range(7)] == [False] * 7 and breaker.allows()
        assert not breaker.succeeded(), "there was no pause"
    for pauses in ((5, 10, 20, 40, 80, 160, 300, 300), (5,)):
        assert [breaker.failed() for _ in range(8)] == [False] * 7 + [True]
        for pause in pauses:
            clock.now += pause - 0.01
            assert not breaker.allows() and not breaker.failed()
            clock.now += 0.01
            assert breaker.allows() and breaker.failed()
        clock.now += 300
        assert breaker.succeeded() and breaker.allows()
