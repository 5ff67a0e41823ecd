"""A simulated server meets what its disk reads, by the decisions and the prices of a real one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.makespan import makespan
from sglang_hc.policy.meeting import History, Split, best_split, from_below
from sglang_hc.tools.datasheet import datasheet_costs, load_hardware
from sglang_hc.tools.simulator.costs import GpuCosts, Machine
from sglang_hc.tools.simulator.engine import Engine
from sglang_hc.tools.simulator.models import SERVER_HOST_WORK, SimulatedModel, load_model
from sglang_hc.tools.simulator.tiers import TieredCache, TierSizes
from sglang_hc.tools.workloads.sessions import Session, Turn, Workload
from sglang_hc.tools.workloads.sessions import Span as Text
from support.examples import examples


def model(forms: str = "kv", gpus: int = 2) -> SimulatedModel:
    found = load_model("llama-13b", forms, gpus, context=16_384)
    return replace(found, host_work=SERVER_HOST_WORK)


MODEL = model()
HISTORY, ASKED = 4096, 60


def balance(model: SimulatedModel, history: int = HISTORY) -> float:
    """Bytes per second at which reading the history takes as long as computing it."""
    return model.token_bytes * history / GpuCosts(model).prefill_seconds(history, 0)


BALANCE = balance(MODEL)


def workload(
    beside: int = 0,
    *,
    history: int = HISTORY,
    asked: int = ASKED,
) -> Workload:
    """A conversation of `history` tokens comes back with `asked` new ones when only the disk has
    it. beside: requests that decode then."""
    text = iter(range(0, 10**9, 10**5))

    def turn(tokens: int, answer: int = 1, at: float | None = None) -> Turn:
        return Turn((Text(next(text), tokens),), Text(next(text), answer), at=at)

    sessions = [
        Session(0.0, (turn(history - 1), turn(asked, at=1000.0))),
        Session(500.0, (turn(16_000),)),  # pushes it out of host memory
        Session(600.0, (turn(16_000),)),
        Session(2000.0, (turn(history + asked),)),
    ]
    sessions += [Session(990.0, (turn(64, 4000),)) for _ in range(beside)]
    return Workload("one returns", tuple(sessions))


def served(
    disk: float,
    load: Workload | None = None,
    *,
    host: int = 100,
    model: SimulatedModel = MODEL,
) -> tuple[TieredCache, float, float]:
    """Returns the cache of a simulation of `workload`, the TTFT of the second turn and the TTFT of
    a prompt of the same length that was never seen, at the end."""
    costs = GpuCosts(model, Machine(disk=disk))
    cache = TieredCache(TierSizes(0, host, 10_000), costs, policy="queue", prefetch="queue")
    engine = Engine(workload() if load is None else load, cache, costs)
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


def planned(
    disk: float,
    model: SimulatedModel = MODEL,
    *,
    history: int = HISTORY,
    asked: int = ASKED,
) -> Split:
    """What the planner says of the second turn."""
    costs = GpuCosts(model, Machine(disk=disk))
    below = from_below(SourceTier.DISK, history, asked)
    return best_split(costs.cost, costs.plan, below)


def serial(
    disk: float, model: SimulatedModel = MODEL, *, history: int = HISTORY, asked: int = ASKED
) -> float:
    """Seconds to read everything, and then to restore it before the new tokens."""
    costs = GpuCosts(model, Machine(disk=disk))
    return costs.read_seconds(history) + costs.restored(history, 0, asked).seconds


@pytest.mark.parametrize("rate", [0.25, 1.0, 4.0])
def test_a_history_on_disk_is_met_when_the_planner_says(rate: float) -> None:
    """The extra over the plan is one chunk's floor, and less than two blocks of rounding."""
    cache, met, recomputed = served(rate * BALANCE)
    wanted = planned(rate * BALANCE).seconds
    costs = GpuCosts(MODEL)
    slack = 3 * costs.prefill_seconds(BLOCK_TOKENS, HISTORY)
    assert wanted * 0.99 <= met <= wanted + slack
    assert met < min(serial(rate * BALANCE), recomputed)
    counters = cache.prefetcher.counters
    assert counters["meetings"] == counters["meetings_restored"] == 1
    assert counters["restore_reason_slow_tier"] == 1


@pytest.mark.parametrize("forms", ["kv", "hidden", "hidden:30,kv:10"])
@settings(deadline=None, max_examples=examples(60))
@given(
    rate=st.floats(0.25, 32), blocks=st.integers(8, 128), asked=st.integers(1, 500),
)  # fmt: skip
@example(rate=7.0, blocks=123, asked=390)  # 0.7996 of what was planned for KV
def test_whatever_is_met_takes_what_the_planner_says(
    forms: str, rate: float, blocks: int, asked: int
) -> None:
    """The decisions are taken again before each chunk, by what has come until then. Too much is
    planned where the disk and the device share the work of few blocks, and where the last run is
    rounded up to a power of two; too little where a few blocks are restored that might have joined
    those that come next."""
    alone, history = model(forms, gpus=1), blocks * BLOCK_TOKENS
    disk = rate * balance(alone, history)
    load = workload(history=history, asked=asked)
    cache, met, recomputed = served(disk, load, host=blocks + 100, model=alone)
    assume(cache.prefetcher.counters["meetings"])
    split = planned(disk, alone, history=history, asked=asked)
    assert 0.75 * split.seconds <= met <= 1.15 * split.seconds
    assert met <= 1.02 * min(serial(disk, alone, history=history, asked=asked), recomputed)


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
    cache, met, _ = served(4 * BALANCE, workload(beside=8))
    assert cache.prefetcher.counters["meetings_restored"] == 1
    begun = 2 * GpuCosts(MODEL).step_seconds(8, 8 * 2000)  # as it arrives, and as the last one does
    assert met < 0.8 * serial(4 * BALANCE) + begun, "what comes is restored meanwhile"


@pytest.mark.parametrize(("host", "meetings"), [(20, 0), (63, 0), (64, 1), (66, 1)])
def test_a_history_is_met_only_if_host_memory_can_hold_it(host: int, meetings: int) -> None:
    """The history has 64 blocks. With one slot less the last ones could continue nothing: what fits
    is read as usual, and the rest is computed."""
    cache, met, recomputed = served(BALANCE, host=host)
    counters = cache.prefetcher.counters
    assert counters["meetings"] == counters["meetings_restored"] == meetings
    assert met <= (0.7 if meetings else 1.02) * recomputed


def test_the_simulator_prices_as_the_plan_does() -> None:
    hardware = load_hardware("A100-40G")
    rates = hardware.flops, hardware.memory_bandwidth, 26e9, 6.9e9
    machine = Machine(*rates, SERVER_HOST_WORK)
    model = load_model("llama-13b", "hidden", gpus=1)
    costs, sheet = GpuCosts(model, machine), datasheet_costs(hardware, model.shape, 26e9, 6.9e9)
    assert costs.cost.copies == sheet.copies and costs.cost.project == sheet.project
    assert costs.cost.prefill == sheet.prefill
    assert costs.prefill_seconds(4096, 64) == pytest.approx(40 * sheet.prefill_layer(4096, 64))
    plan = costs.restored(1024, 0, 64)
    times = costs.cost.layer_times(SourceTier.HOST, 1024, new=64)
    assert plan.as_stored_seconds == pytest.approx(makespan(times, model.layout.plan))
    assert costs.read_seconds(BLOCK_TOKENS) == pytest.approx(model.slot_bytes / 6.9e9)


def test_the_block_that_is_being_read_counts_with_the_time_that_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk works on one block after the other, so it never is more than the price of one."""
    seen: list[History] = []
    split = GpuCosts.split

    def note(costs: GpuCosts, history: History, *args: Any) -> Split | None:
        seen.append(history)
        return split(costs, history, *args)

    monkeypatch.setattr(GpuCosts, "split", note)
    served(BALANCE)
    block = GpuCosts(MODEL, Machine(disk=BALANCE)).read_seconds(BLOCK_TOKENS)
    taken = [span.taken for history in seen for span in history.coming]
    assert max(taken) > block / 100
    assert all(0.0 <= seconds <= block * (1 + 1e-6) for seconds in taken)
