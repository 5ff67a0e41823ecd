"""Whole simulations: what must come out whatever the numbers are."""

import dataclasses
from pathlib import Path

import pytest

from sglang_hc.tools.simulator.clairvoyant import replay
from sglang_hc.tools.simulator.costs import GpuCosts
from sglang_hc.tools.simulator.engine import Engine, Serving
from sglang_hc.tools.simulator.jobs import OVERFLOW_MODES, Overflow
from sglang_hc.tools.simulator.models import load_model
from sglang_hc.tools.simulator.run import SIMULATED_POLICIES, Setup, simulate
from sglang_hc.tools.simulator.tiers import TieredCache
from sglang_hc.tools.simulator.workloads import attentionstore, l_eval, sharegpt4
from sglang_hc.tools.workloads.reading import Timing, read_trace

pytestmark = pytest.mark.long

SAMPLES = Path(__file__).parents[3] / "benchmark" / "simulator" / "samples"

MODEL = load_model("llama-13b")
CONVERSATIONS = attentionstore(sessions=60, rate=4.0, think=0.0)
SCARCE = Setup(CONVERSATIONS, MODEL, dram=15e9, disk=30e9, serving=Serving(max_batch=2))
KEEPING = [policy for policy in SIMULATED_POLICIES if policy != "none"]
PLENTY = Setup(CONVERSATIONS, MODEL, dram=1e12, disk=1e12)


@pytest.mark.parametrize("overflow", OVERFLOW_MODES)
@pytest.mark.parametrize("policy", KEEPING)
def test_with_room_for_everything_everything_is_hit(policy, overflow):
    setup = dataclasses.replace(PLENTY, policy=policy, serving=Serving(overflow=overflow))
    measures = simulate(setup).measures
    assert measures.hit_tokens == measures.reusable
    assert measures.turn_hits == measures.returning_turns > 50


@pytest.mark.parametrize("policy", KEEPING)
def test_tiers_and_window_add_up_when_all_is_served(policy):
    setup = dataclasses.replace(SCARCE, policy=policy, device=2e9)
    served = []
    result = simulate(setup, served.append)
    measures = result.measures
    assert served[-1] == CONVERSATIONS.num_turns
    assert measures.turns == CONVERSATIONS.num_turns - CONVERSATIONS.warmup_turns
    assert result.host_evictions > 0 and result.disk_evictions > 0
    assert measures.hit_tokens <= measures.reusable <= measures.prompt_tokens


@pytest.mark.parametrize("policy", ["queue", "lru"])
@pytest.mark.parametrize("prefetch", ["queue", "on-arrival", "at-turn", "off"])
def test_no_slot_is_lost_or_owned_twice(policy, prefetch):
    setup = dataclasses.replace(SCARCE, device=1e9)
    costs = GpuCosts(MODEL)
    cache = TieredCache(setup.sizes, costs, policy=policy, prefetch=prefetch)
    Engine(CONVERSATIONS, cache, costs).run()
    assert cache.host is not None and cache.device is not None and cache.disk is not None
    cache.host.check_integrity()
    cache.device.check_integrity()
    cache.disk.check_integrity()
    cache.window.check_integrity()
    assert cache.host.staged_slots == 0 and not cache.jobs


def test_the_queue_beats_the_past_and_stays_under_the_bound():
    rate = {
        policy: simulate(dataclasses.replace(SCARCE, policy=policy)).measures.hit_tokens
        for policy in ("queue", "lru", "fifo", "belady")
    }
    assert rate["queue"] > 1.2 * max(rate["lru"], rate["fifo"])
    assert rate["queue"] <= rate["belady"]


@pytest.mark.parametrize(
    "workload",
    [sharegpt4(sessions=40, rate=4.0), l_eval(sessions=150, rate=4.0, contexts=30)],
    ids=lambda w: w.name,
)
def test_nothing_beats_the_clairvoyant_on_its_record(workload):
    setup = Setup(workload, MODEL, dram=20e9, disk=60e9)
    record = simulate(setup)
    bound = simulate(dataclasses.replace(setup, policy="belady")).measures
    assert record.measures.hit_tokens <= bound.hit_tokens * 1.005  # partly equal blocks aside


@pytest.mark.parametrize("name", ["mooncake.jsonl", "bailian.jsonl", "burstgpt.csv"])
def test_samples_run_through(name):
    workload = read_trace(SAMPLES / name, Timing())
    measures = simulate(Setup(workload, MODEL, dram=20e9, disk=100e9)).measures
    assert measures.turns == workload.num_turns
    assert 0 < measures.hit_tokens < measures.prompt_tokens


def test_prefetch_brings_the_hits_into_dram():
    share = {}
    for prefetch in ("queue", "at-turn"):
        setup = dataclasses.replace(SCARCE, disk=1e12, prefetch=prefetch)
        measures = simulate(setup).measures
        share[prefetch] = (measures.host + measures.device) / measures.hit_tokens
    assert share["queue"] > 0.9 > share["at-turn"]


def test_the_less_a_cut_invalidates_the_more_is_hit():
    """Moved state beats a cut in steps that is prefilled once, and that beats sliding each turn."""
    moved, stepped, slid = (
        simulate(dataclasses.replace(PLENTY, serving=Serving(overflow=mode))).measures
        for mode in ("reembed", "recompute", "off")
    )
    assert moved.prompt_tokens == stepped.prompt_tokens
    rate = [m.hit_tokens / m.prompt_tokens for m in (moved, stepped, slid)]
    assert rate[0] > 1.2 * rate[1] > 1.4 * rate[2]


def test_a_run_is_deterministic():
    first, second = simulate(SCARCE), simulate(SCARCE)
    assert first.events == second.events
    assert first.measures.as_json() == second.measures.as_json()


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_a_recorded_run_replayed_gives_the_same_hits_and_evictions(policy):
    setup = dataclasses.replace(SCARCE, policy=policy)
    run = simulate(setup)
    costs = GpuCosts(MODEL)
    cache = TieredCache(setup.sizes, costs, policy=policy, prefetch="at-turn")
    again = replay(CONVERSATIONS, Overflow("off", MODEL.context), run.events, cache, costs)
    for name in ("turns", "turn_hits", "host", "disk", "reusable", "prompt_tokens"):
        assert getattr(again, name) == getattr(run.measures, name)
    assert cache.host is not None and cache.host.evicted_blocks == run.host_evictions
    assert cache.disk is not None and cache.disk.evicted_blocks == run.disk_evictions


def test_ready_first_serves_everyone():
    setup = dataclasses.replace(SCARCE, serving=Serving(max_batch=2, ready_first=True))
    assert simulate(setup).measures.turns == simulate(SCARCE).measures.turns
