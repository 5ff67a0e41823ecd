"""A simulated server is run as a real one is: passes over prompts, one KV pool, and its time."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.layer_plan import served_seconds
from sglang_hc.policy.restore_plan import plan_restore
from sglang_hc.tools.cli.plan import report_of
from sglang_hc.tools.datasheet import HostWork, datasheet_costs, load_hardware
from sglang_hc.tools.simulator.costs import GpuCosts, Machine, Part, with_auto_plan
from sglang_hc.tools.simulator.engine import Engine, Serving
from sglang_hc.tools.simulator.models import SERVER_HOST_WORK, SimulatedModel, load_model
from sglang_hc.tools.simulator.run import Result, Setup, simulate
from sglang_hc.tools.simulator.tiers import TieredCache
from sglang_hc.tools.workloads.sessions import Session, Span, Turn, Workload
from support.examples import examples

MODEL = load_model("llama-13b", context=16_384)
GPU = load_hardware("A100-40G")


def machine(link: float = 26e9, disk: float = 5e9) -> Machine:
    return Machine(GPU.flops, GPU.memory_bandwidth, link, disk, SERVER_HOST_WORK)


def talks(rows: list[tuple[float, list[tuple[int, int]]]]) -> Workload:
    """Sessions as (arrival, turns as (new tokens, answer)); nobody shares anything."""
    starts = count(0, 1 << 16)
    return Workload(
        "talks",
        tuple(
            Session(
                at,
                tuple(
                    Turn((Span(next(starts), asked),), Span(next(starts), answer))
                    for asked, answer in turns
                ),
            )
            for at, turns in rows
        ),
    )


loads = st.lists(
    st.tuples(
        st.floats(0, 30),
        st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 300)), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=6,
).map(talks)


@settings(deadline=None, max_examples=examples(40))
@given(
    load=loads,
    policy=st.sampled_from(["queue", "lru", "none"]),
    chunk=st.sampled_from([0, 512, 8192]),
    mixed=st.booleans(),
    batch=st.integers(1, 4),
    kv_tokens=st.sampled_from([None, 17_000, 40_000]),
    read_buffer=st.booleans(),
)
def test_all_is_served_and_all_time_is_spent_on_something(
    load: Workload,
    policy: str,
    chunk: int,
    mixed: bool,
    batch: int,
    kv_tokens: int | None,
    read_buffer: bool,
) -> None:
    serving = Serving(batch, chunk, mixed, read_buffer=read_buffer)
    size = 0.0 if policy == "none" else 5e9
    setup = Setup(load, MODEL, size, 4 * size, policy=policy, serving=serving, kv_tokens=kv_tokens)
    costs = GpuCosts(MODEL)
    cache = TieredCache(setup.sizes, costs, policy=policy, prefetch=setup.prefetch_mode)
    measures = Engine(load, cache, costs, serving).run()
    gpu = measures.gpu
    assert measures.turns == load.num_turns
    assert gpu.prefill + gpu.decode + gpu.idle == pytest.approx(gpu.now, rel=1e-6)
    assert gpu.prefill > 0 and min(measures.service_ttft) > 0
    together = map(sum, zip(measures.queue_wait, measures.service_ttft, strict=True))
    assert list(together) == pytest.approx(measures.ttft)
    answered = sum(turn.answer.length for s in load.sessions for turn in s.turns)
    assert measures.output_tokens == answered
    if cache.pool is not None:
        assert cache.pool.held == 0
        cache.pool.idle.check_integrity()


def test_the_end_of_a_load_is_no_part_of_the_share_of_prefill() -> None:
    """One conversation goes on alone for long: what it decodes then is not counted."""
    short = [(0.0, [(2000, 20)]) for _ in range(8)]
    shares = []
    for answer in (20, 4000):
        setup = Setup(talks([*short, (0.0, [(2000, answer)])]), MODEL, 0, 0, policy="none")
        measures = simulate(replace(setup, serving=Serving(max_batch=2))).measures
        assert measures.prefill_share >= 0.999 * measures.gpu.prefill_share
        shares.append(measures.prefill_share)
    assert shares[1] == pytest.approx(shares[0], rel=0.2) and shares[1] > 0.1


# -- one request --------------------------------------------------------------------------------


def returns(history: int, asked: int) -> Workload:
    """A conversation of `history` tokens that comes back long after."""
    first = Turn((Span(0, history - 1),), Span(1 << 20, 1))
    later = Turn((Span(1 << 21, asked),), Span(1 << 22, 1), at=1000.0)
    return Workload("returns", (Session(0.0, (first, later)),))


def model(forms: str) -> SimulatedModel:
    alone = load_model("llama-13b", "kv" if forms == "auto" else forms, 1, context=16_384)
    return with_auto_plan(alone, machine(), (SourceTier.HOST,)) if forms == "auto" else alone


@pytest.mark.parametrize("forms", ["kv", "hidden", "auto"])
@pytest.mark.parametrize(("history", "asked"), [(1024, 64), (4096, 64), (4096, 500), (8192, 64)])
def test_one_returning_request_takes_what_plan_says(forms: str, history: int, asked: int) -> None:
    """As it is stored, or with the layers that its planner recomputes for this history."""
    simulated = model(forms)
    load = returns(history, asked)
    took = simulate(Setup(load, simulated, 1e12, 0, machine=machine())).measures.ttft[-1]
    sheet = datasheet_costs(GPU, simulated.shape, 26e9)
    stored = simulated.layout.plan
    planned = plan_restore(sheet, stored, history, context=0, new=asked)
    assert took == pytest.approx(planned.seconds, rel=0.02)
    if forms != "auto":
        way = report_of(sheet, simulated.shape, SourceTier.HOST, history, asked).ways[forms]
        assert (way.plan, way.planned) == (stored, planned)
        if not way.more_recomputed:
            assert took == pytest.approx(way.ttft, rel=0.02)


@pytest.mark.parametrize("forms", ["kv", "hidden", "auto"])
@pytest.mark.parametrize("history", [1024, 2048, 4096, 8192])
def test_one_returning_request_from_disk_takes_what_plan_says(forms: str, history: int) -> None:
    simulated, asked = model(forms), 64
    (back,) = returns(history, asked).sessions
    others = talks([(500.0, [(16_000, 1)]), (600.0, [(16_000, 1)])]).sessions
    pushing = tuple(
        replace(one, turns=(replace(one.turns[0], said=(Span((5 + n) << 21, 16_000),)),))
        for n, one in enumerate(others)
    )
    dram = simulated.slot_bytes * max(260, history // BLOCK_TOKENS + 100)
    load = Workload("returns", (back, *pushing))
    result = simulate(Setup(load, simulated, dram, 1e13, machine=machine()))
    took = next(e.time for e in result.events[::-1] if (e.kind, e.session) == ("first", 0)) - 1000.0
    sheet = datasheet_costs(GPU, simulated.shape, 26e9, 5e9)
    planned = served_seconds(sheet, simulated.layout.plan, SourceTier.DISK, history, asked)
    assert took == pytest.approx(planned, rel=0.07)


# -- passes -------------------------------------------------------------------------------------

COSTS = GpuCosts(MODEL)
parts = st.lists(
    st.tuples(st.integers(1, 4000), st.integers(0, 4000), st.integers(0, 6000)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=examples(60))
@given(sizes=parts, rows=st.integers(0, 24))
def test_a_pass_takes_no_longer_than_its_parts_one_by_one(
    sizes: list[tuple[int, int, int]], rows: int
) -> None:
    made = [
        Part(new, context, COSTS.restored(stored, context, new) if stored else None)
        for new, context, stored in sizes
    ]
    alone = [COSTS.pass_seconds([part]) for part in made]
    together = COSTS.pass_seconds(made)
    assert max(alone) * 0.999 <= together <= sum(alone) * 1.001
    mixed = COSTS.pass_seconds(made, rows, rows * 1000.0)
    assert mixed >= together * 0.999
    if rows:
        assert mixed <= together + COSTS.step_seconds(rows, rows * 1000.0)


def test_others_decode_between_the_turns_of_a_mixed_server_but_not_in_a_long_prompt() -> None:
    """One request decodes while a long prompt is computed in chunks: only mixed passes let it."""
    load = talks([(0.0, [(64, 400)]), (0.5, [(16_000, 1)])])
    ends = {}
    for mixed in (False, True):
        serving = Serving(chunk=512, mixed=mixed)
        result = simulate(Setup(load, MODEL, 0, 0, policy="none", serving=serving))
        ends[mixed] = [e.time for e in result.events if (e.kind, e.session) == ("finish", 0)]
    assert ends[True] < ends[False]


def test_a_layer_of_a_prompt_takes_at_least_its_host_work() -> None:
    work = {
        seconds: GpuCosts(MODEL, replace(machine(), host_work=HostWork(0, seconds)))
        for seconds in (0, 1e-3)
    }
    for new in (1, 100):
        assert work[1e-3].prefill_seconds(new, 0) == pytest.approx(40 * 1e-3)
        assert work[0].prefill_seconds(new, 0) < 40 * 0.5e-3
    assert work[1e-3].prefill_seconds(4000, 0) == work[0].prefill_seconds(4000, 0)


# -- the KV pool, prefetch, output --------------------------------------------------------------


def pool_run(kv_tokens: int | None) -> Result:
    load = talks([(0.0, [(3000, 100)] * 2) for _ in range(6)])
    return simulate(Setup(load, MODEL, 0, 0, policy="none", kv_tokens=kv_tokens))


def test_running_requests_and_idle_state_share_the_pool() -> None:
    """With room for one request at a time the others wait; with more, second turns find the
    first ones on the device."""
    unbounded, small, large = pool_run(None), pool_run(7_000), pool_run(100_000)
    assert unbounded.measures.hit_tokens == 0
    assert max(small.measures.queue_wait) > 2 * max(large.measures.queue_wait)
    assert large.measures.device > 6 * 2900 > small.measures.device


def test_without_prefetch_the_disk_is_never_read() -> None:
    load = talks([(0.0, [(3000, 10)] * 3), (0.0, [(3000, 10)] * 3)])
    setup = Setup(load, MODEL, 1.6e9, 1e12, machine=machine(disk=1e12))
    found = {
        prefetch: simulate(replace(setup, prefetch=prefetch)).measures
        for prefetch in ("off", "at-turn", "queue")
    }
    assert found["off"].disk == 0
    assert found["off"].hit_tokens < found["at-turn"].hit_tokens <= found["queue"].hit_tokens


def test_a_capped_answer_decodes_less_and_is_remembered_whole() -> None:
    load = talks([(0.0, [(200, 2000), (200, 2000)])])
    whole, capped = (
        simulate(Setup(load, MODEL, 1e12, 0, serving=Serving(output_cap=cap))).measures
        for cap in (None, 100)
    )
    assert capped.prompt_tokens == whole.prompt_tokens
    assert capped.hit_tokens == whole.hit_tokens
    assert capped.output_tokens == 200
    assert capped.gpu.decode < whole.gpu.decode / 15


def test_what_waits_in_host_memory_is_restored_ahead() -> None:
    """Behind a long answer the next turn's state is on the device when its turn comes."""
    load = talks([(0.0, [(4096, 1), (64, 1)]), (0.1, [(64, 2000)])])
    setup = Setup(load, MODEL, 1e12, 0, serving=Serving(max_batch=1), machine=machine())
    ahead = {
        buffered: simulate(
            replace(setup, serving=Serving(max_batch=1, read_buffer=buffered))
        ).measures
        for buffered in (False, True)
    }
    last = {buffered: found.service_ttft[-1] for buffered, found in ahead.items()}
    costs = GpuCosts(MODEL, machine())
    alone = costs.prefill_seconds(64, 4096)
    assert last[True] == pytest.approx(alone, rel=0.25)
    assert last[True] < costs.restored(4096, 0, 64).seconds / 2
    assert last[False] >= last[True]
    assert ahead[True].restored > BLOCK_TOKENS * 60
