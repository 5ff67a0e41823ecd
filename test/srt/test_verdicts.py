"""How long the clock of decisions may stand still: never while somebody's wait ends by it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hc.srt.verdicts import FETCHING_S, KEEPING_S, WAITING_S, patience


def tiers(*, coming: int = 0, meets: bool = False, waiting: int = 0, is_timed: bool = False) -> Any:
    return SimpleNamespace(
        disk=SimpleNamespace(coming=range(coming)),
        queue=SimpleNamespace(
            meetings=SimpleNamespace(under_way=meets),
            requests=SimpleNamespace(order=["r"] * waiting),
        ),
        retention=SimpleNamespace(is_timed=is_timed),
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, math.inf),
        ({"is_timed": True}, KEEPING_S),
        ({"waiting": 1, "is_timed": True}, WAITING_S),
        ({"coming": 1, "waiting": 1}, FETCHING_S),
        ({"meets": True}, FETCHING_S),  # it waits for blocks that found no slot, too
    ],
)
def test_the_shortest_wait_counts(given: dict[str, Any], wanted: float) -> None:
    assert patience(tiers(**given)) == wanted


def test_without_a_disk_only_turns_and_pins_count() -> None:
    some = tiers(waiting=1)
    some.disk = None
    assert patience(some) == WAITING_S
