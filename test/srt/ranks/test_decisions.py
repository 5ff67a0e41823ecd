"""How long the clock of decisions may stand still: never while somebody's wait ends by it. And when
the requests of a pass go on to the next stage of a pipeline."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hc.srt.ranks.decisions import NextStage
from sglang_hc.tiers.tiers import FETCHING_S, KEEPING_S, WAITING_S, Tiers
from support.start_groups import as_rank


def tiers(
    *,
    coming: int = 0,
    meets: bool = False,
    waiting: int = 0,
    is_timed: bool = False,
    learns: bool = False,
) -> Any:
    return SimpleNamespace(
        disk=SimpleNamespace(coming=range(coming)),
        meetings=SimpleNamespace(under_way=meets),
        queue=SimpleNamespace(window=SimpleNamespace(queue=("r",) * waiting)),
        retention=SimpleNamespace(is_timed=is_timed),
        away=object() if learns else None,
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, math.inf),
        ({"is_timed": True}, KEEPING_S),
        ({"learns": True}, KEEPING_S),
        ({"waiting": 1, "is_timed": True}, WAITING_S),
        ({"coming": 1, "waiting": 1}, FETCHING_S),
        ({"meets": True}, FETCHING_S),  # it waits for blocks that found no slot, too
    ],
)
def test_the_shortest_wait_counts(given: dict[str, Any], wanted: float) -> None:
    assert Tiers.patience(tiers(**given)) == wanted


def test_without_a_disk_only_turns_and_pins_count() -> None:
    some = tiers(waiting=1)
    some.disk = None
    assert Tiers.patience(some) == WAITING_S


class Pipeline:
    """What `NextStage` asks of a scheduler."""

    def __init__(self) -> None:
        self.began: list[Any] = []

    def _pp_send_pyobj_to_next_stage(self, requests: list[Any], async_send: bool) -> list[Any]:
        self.began.append(requests)
        return [f"{requests} on its way"]


def stage_of(number: int, stages: int) -> tuple[Pipeline, NextStage]:
    scheduler = Pipeline()
    with as_rank(pp_rank=number, pp_size=stages):
        return scheduler, NextStage(scheduler)


def test_requests_go_on_before_they_are_handled_and_only_once() -> None:
    scheduler, stage = stage_of(1, 3)
    for requests in (["a"], []):
        stage.send(requests)
        assert scheduler.began[-1] == requests
        # The scheduler has handled them, sends them, and waits for that in its next pass.
        sent = scheduler._pp_send_pyobj_to_next_stage(requests, async_send=True)
        assert sent == [f"{requests} on its way"]
    assert scheduler.began == [["a"], []] and stage.sent == []


def test_what_the_scheduler_has_not_asked_for_is_kept_while_it_is_sent() -> None:
    scheduler, stage = stage_of(0, 2)
    stage.send([1])
    stage.send([2])
    both = scheduler._pp_send_pyobj_to_next_stage([2], async_send=True)
    assert both == ["[1] on its way", "[2] on its way"]


@pytest.mark.parametrize(("number", "stages"), [(0, 1), (2, 3)])
def test_from_the_last_stage_requests_go_nowhere(number: int, stages: int) -> None:
    scheduler, stage = stage_of(number, stages)
    stage.send([1])
    assert scheduler.began == []
