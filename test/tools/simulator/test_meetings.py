"""A simulated server meets what its disk reads, by the decisions and the prices of a real one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.makespan import makespan
from sglang_hc.policy.meeting import History, Span, best_split
from sglang_hc.tools.datasheet import datasheet_costs, load_hardware
from sglang_hc.tools.simulator.engine import Engine
from sglang_hc.tools.simulator.models import (
    SERVER_LAYER_OVERHEAD,
    GpuCosts,
    Machine,
    load_model,
)
from sglang_hc.tools.simulator.tiers import TieredCache, TierSizes
from sglang_hc.tools.simulator.workloads import Session, Turn, Workload
from sglang_hc.tools.simulator.workloads import Span as Text

MODEL = replace(load_model("llama-13b", context=16_384), layer_overhead=SERVER_LAYER_OVERHEAD)
HISTORY, ASKED = 4096, 60
PROMPT = HISTORY + ASKED
BALANCE = MODEL.token_bytes * HISTORY / GpuCosts(MODEL).prefill_seconds(HISTORY, 0)
"""Bytes per second at which reading the history takes as long as computing it."""


def served(disk: float, beside: int = 0, host: int = 100) -> tuple[TieredCache, float, float]:
    """A conversation comes back when only the disk has it. beside: requests that decode then.

    Returns its cache, the TTFT of its second turn and the TTFT of a prompt of the same length that
    was never seen, at the end."""
    text = iter(range(0, 10**9, 10**5))

    def turn(tokens: int, answer: int = 1, at: float | None = None) -> Turn:
        return Turn((Text(next(text), tokens),), Text(next(text), answer), at=at)

    sessions = [
        Session(0.0, (turn(HISTORY - 1), turn(ASKED, at=1000.0))),
        Session(500.0, (turn(16_000),)),  # pushes it out of host memory
        Session(600.0, (turn(16_000),)),
        Session(2000.0, (turn(PROMPT),)),
    ]
    sessions += [Session(990.0, (turn(64, 4000),)) for _ in range(beside)]
    costs = GpuCosts(MODEL, Machine(disk=disk))
    cache = TieredCache(TierSizes(0, host, 10_000), costs, policy="queue", prefetch="queue")
    engine = Engine(Workload("one returns", tuple(sessions)), cache, costs)
    measures = engine.run()
    for tier in (cache.host, cache.disk):
        assert tier is not None
        tier.check_integrity()
    assert cache.host is not None and cache.host.staged_slots == 0
    returned = [event.time for event in engine.events].index(1000.0)
    assert engine.events[returned].kind == "arrive"
    admitted = [event.session for event in engine.events if event.kind == "admit"]
    second = len(admitted) - 1 - admitted[::-1].index(0)
    return cache, measures.ttft[second], measures.ttft[admitted.index(3)]


def expected(disk: float) -> tuple[float, float]:
    """(the planner's best split, reading everything first)."""
    costs = GpuCosts(MODEL, Machine(disk=disk))
    history = [Span(SourceTier.DISK, HISTORY)]
    split = best_split(costs.cost, costs.plan, History(0, history, 0, ASKED))
    host = costs.restored(HISTORY, 0, ASKED)
    return split.seconds, costs.read_seconds(HISTORY) + host.seconds


@pytest.mark.parametrize("rate", [0.25, 1.0, 4.0])
def test_a_history_on_disk_is_met_when_the_planner_says(rate: float) -> None:
    """The extra over the plan is one chunk's floor, and less than two blocks of rounding."""
    cache, met, recomputed = served(rate * BALANCE)
    planned, serial = expected(rate * BALANCE)
    costs = GpuCosts(MODEL)
    slack = 3 * costs.prefill_seconds(BLOCK_TOKENS, HISTORY)
    assert planned * 0.99 <= met <= planned + slack
    assert met < min(serial, recomputed)
    counters = cache.prefetcher.counters
    assert counters["meetings"] == counters["meetings_restored"] == 1
    assert counters["restore_reason_slow_tier"] == 1


@pytest.mark.parametrize("rate", [1e-4, 1e4])
def test_a_disk_far_from_the_balance_is_left_alone_or_read_whole(rate: float) -> None:
    cache, took, recomputed = served(rate * BALANCE)
    assert cache.prefetcher.counters["meetings"] == 0
    if rate < 1:
        assert took == pytest.approx(recomputed)
    else:
        assert took < recomputed / 3


def test_beside_decoding_requests_the_head_is_not_computed_where_reading_is_nearly_as_fast() -> (
    None
):
    """Every second of the head keeps them waiting too, so the disk reads everything alone."""
    cache, _, _ = served(4 * BALANCE, beside=8)
    assert cache.prefetcher.counters["meetings"] == 0
    assert cache.prefetcher.counters["prefetches"] > 0


def test_where_host_memory_holds_only_a_part_the_rest_is_computed() -> None:
    """20 slots for 64 blocks: the meeting begins, and what finds no slot is not waited for."""
    cache, met, recomputed = served(BALANCE, host=20)
    assert cache.prefetcher.counters["meetings"] == 1
    assert met <= recomputed + 3 * GpuCosts(MODEL).prefill_seconds(BLOCK_TOKENS, HISTORY)


def test_the_simulator_prices_as_the_plan_does() -> None:
    hardware = load_hardware("A100-40G")
    machine = Machine(hardware.flops, hardware.memory_bandwidth, 26e9, 6.9e9)
    model = load_model("llama-13b", "hidden", gpus=1)
    costs, sheet = GpuCosts(model, machine), datasheet_costs(hardware, model.shape, 26e9, 6.9e9)
    assert costs.cost.copies == sheet.copies and costs.cost.project == sheet.project
    assert costs.cost.prefill.floor == sheet.prefill.floor + model.layer_overhead
    assert costs.prefill_seconds(4096, 64) == pytest.approx(40 * sheet.prefill_layer(4096, 64))
    plan = costs.restored(1024, 0, 64)
    times = costs.cost.layer_times(SourceTier.HOST, 1024, new=64)
    assert plan.as_stored_seconds == pytest.approx(makespan(times, model.layout.plan))
    assert costs.read_seconds(BLOCK_TOKENS) == pytest.approx(model.slot_bytes / 6.9e9)
