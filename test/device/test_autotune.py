"""Which of several ways is used: only one that agrees, and of these the fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from sglang_hc.device.autotune import ROUNDS, agreeing, choose, fastest


def differs(first: torch.Tensor, other: torch.Tensor) -> str | None:
    return None if torch.equal(first, other) else "wrong numbers"


def test_a_way_that_differs_or_fails_is_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> torch.Tensor:
        raise RuntimeError("no such instruction")

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "first": lambda: torch.ones(2),
        "same": lambda: torch.ones(2),
        "other": lambda: torch.zeros(2),
        "failing": fails,
    }
    with caplog.at_level(logging.WARNING):
        assert agreeing("the work", ways, differs) == ["first", "same"]
    assert "the work by other is not used: wrong numbers" in caplog.text
    assert "the work by failing is not used: RuntimeError: no such instruction" in caplog.text


def test_the_smallest_median_wins_and_ways_take_turns() -> None:
    ran: list[str] = []
    ways = {name: lambda name=name: ran.append(name) for name in "ab"}
    times = {"a": iter([1.0, 1.0, 9.0, 9.0, 9.0]), "b": iter([5.0] * ROUNDS)}

    def seconds(work: Callable[[], object]) -> float:
        work()
        return next(times[ran[-1]])

    assert fastest("the work", ways, seconds) == "b"
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
            "the work", ways, lambda way: torch.ones(2), differs, works,
            lambda work: work() or 1.0,
        )  # fmt: skip
    assert chosen == "first"
    wanted = "the work by failing is not used: RuntimeError: out of resource: shared memory"
    assert wanted in caplog.text


def test_without_the_first_way_nothing_is_chosen() -> None:
    def fails() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fastest("the work", {"first": fails, "other": lambda: None}, lambda work: 1.0)


def test_one_way_is_not_timed() -> None:
    def never(work: Callable[[], object]) -> float:
        raise AssertionError

    assert fastest("the work", {"only": lambda: None}, never) == "only"
