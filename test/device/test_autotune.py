"""Which of several ways is used: only one that agrees, and of these the fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from sglang_hc.device.autotune import ROUNDS, choose


def differs(first: torch.Tensor, other: torch.Tensor) -> str | None:
    return None if torch.equal(first, other) else "wrong numbers"


def run(way: Callable[[], object]) -> object:
    return way()


def test_a_way_that_differs_or_fails_is_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> torch.Tensor:
        raise RuntimeError("no such instruction")

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "first": lambda: torch.ones(2),
        "other": lambda: torch.zeros(2),
        "failing": fails,
        "same": lambda: torch.ones(2),
    }
    timed: list[object] = []

    def seconds(work: Callable[[], object]) -> float:
        timed.append(work())
        return 1.0 / len(timed)

    with caplog.at_level(logging.WARNING):
        assert choose("the work", ways, run, seconds, run, differs) == "same"
    assert len(timed) == 2 * ROUNDS
    assert "the work by other is not used: wrong numbers" in caplog.text
    assert "the work by failing is not used: RuntimeError: no such instruction" in caplog.text


def test_the_smallest_median_wins_and_ways_take_turns() -> None:
    ran: list[str] = []
    ways = {name: lambda name=name: ran.append(name) for name in "ab"}
    times = {"a": iter([1.0, 1.0, 9.0, 9.0, 9.0]), "b": iter([5.0] * ROUNDS)}

    def seconds(work: Callable[[], object]) -> float:
        work()
        return next(times[ran[-1]])

    assert choose("the work", ways, run, seconds) == "b"
    assert ran == ["a", "b"] * (ROUNDS + 1)


def test_a_way_that_fails_when_it_is_timed_is_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ways are compared with a few rows and timed with many: a kernel that needs too much shared
    memory for many ended the start."""

    def works(rows: str) -> None:
        if rows == "fails with many":
            raise RuntimeError("out of resource: shared memory")

    ways = {"first": "a", "failing": "fails with many", "other": "c"}
    with caplog.at_level(logging.WARNING):
        chosen = choose(
            "the work", ways, works, lambda work: work() or 1.0, lambda way: torch.ones(2),
            differs,
        )  # fmt: skip
    assert chosen == "first"
    wanted = "the work by failing is not used: RuntimeError: out of resource: shared memory"
    assert wanted in caplog.text


def test_without_the_first_way_nothing_is_chosen() -> None:
    def fails() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        choose("the work", {"first": fails, "other": lambda: None}, run, lambda work: 1.0)


def test_one_way_is_not_timed() -> None:
    def never(work: Callable[[], object]) -> float:
        raise AssertionError

    assert choose("the work", {"only": lambda: None}, run, never) == "only"
