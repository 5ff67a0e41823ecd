"""Ways to serve a model that is larger than the device, by one model of a pass."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.throughput.paper import paper_model
from sglang_hc.policy.streamed_pass import Load, PassTimes, Split, steady
from sglang_hc.policy.throughput import Processor, Requests, Served, Ways, best_batch
from support.examples import examples
from support.streamed import streamed_models

OPT_30B = paper_model("30B")
OUTPUT_LAYER = 2 * 50272 * 7168 / 1008e9
"""Seconds to read it."""
CPU = Processor(75e9, 2 * 12 * 7168**2 / 1.5e12)
ways_of = st.builds(
    Ways,
    streamed_models(),
    st.builds(Requests, st.integers(1, 300), st.integers(1, 300)),
    st.builds(Processor, st.floats(1.0, 1e3), st.floats(0.01, 10.0)),
)


def test_times_and_bytes_of_a_pass_by_hand():
    """OPT-30B: 12 x 7168^2 weights in a layer, 28,672 bytes of K and V, 14,336 of hidden states."""
    load, split = Load(100, 1e5, 100), Split(4e4, 5e4, 1e4, 0.0, 8)
    weights = 12 * 7168**2 * 2
    link, compute = OPT_30B.times(load, split, 4)
    assert link == pytest.approx((40 * weights + 48 * (4e4 * 28672 + 5e4 * 14336)) / 25e9)
    flops = 330e12 * 0.35
    step = max(weights / 1008e9, 100 * weights / flops) + 1e5 * 28672 / 1008e9
    projected = 6e4 * 4 * 7168**2 / flops
    rounds = 4 * (1e-4 + 4 * 7168**2 / 1008e9)
    assert compute == pytest.approx(48 * (step + projected + rounds) + OUTPUT_LAYER)
    assert OPT_30B.host_bytes(split) == 40 * weights + 48 * (4e4 * 28672 + 5e4 * 14336)
    places = 2 * 28672 * 1e5 / 4
    assert OPT_30B.device_bytes(split, 4) == 10 * weights + 48 * 1e4 * 14336 + places
    assert OPT_30B.device_bytes(Split(device_kv=10, resident=47)) == 48 * (weights + 10 * 28672)


def test_few_tokens_read_only_the_experts_that_they_are_routed_to():
    sparse = dataclasses.replace(OPT_30B, active=0.1, per_new=0.0)
    steps = [sparse.step(Load(new, 0.0, new)) for new in (1, 5, 10, 100)]
    assert steps == pytest.approx([share * sparse.read_w for share in (0.1, 0.5, 1.0, 1.0)])


@pytest.mark.parametrize(
    ("times", "bound"), [((1.0, 0.9), "link"), ((0.9, 1.0), "compute"), ((1.0, 0.98), "balanced")]
)
def test_what_works_longer_is_the_bound(times, bound):
    assert PassTimes(*times).bound == bound
    assert (PassTimes(*times).ahead, PassTimes(*times).in_line) == (1.0, sum(times))


@given(ways_of, st.integers(1, 40))
def test_a_way_that_can_do_more_is_never_slower(ways, batch):
    served = {way: ways.serve(way, batch) for way in ways.names}
    seconds = {way: one.seconds if one else math.inf for way, one in served.items()}
    assert seconds["ahead"] <= seconds["sglang"]
    assert seconds["hybrid"] <= min(seconds["kv"], seconds["act"]) * (1 + 1e-9)
    for way, one in served.items():
        if one is not None:
            assert ways.model.fits(one.split, one.rounds) and one.rounds <= batch
            assert one.split.tokens == pytest.approx(one.load.tokens)
            assert one.split.device_kv == (one.load.tokens if way in ("ahead", "sglang") else 0)


@given(ways_of, st.integers(1, 40))
def test_as_many_layers_are_resident_as_fit(ways, batch):
    served, tokens = ways.serve("ahead", batch), steady(batch, *ways.requests).tokens
    splits = [Split(device_kv=tokens, resident=count) for count in range(ways.model.layers + 1)]
    fitting = [split for split in splits if ways.model.fits(split)]
    assert (served.split if served else None) == (fitting[-1] if fitting else None)


@given(ways_of)
@settings(max_examples=examples(15))
def test_no_batch_generates_much_more_than_the_best(ways):
    for way in ways.names:
        best = ways.best(way)
        every = (ways.serve(way, batch) for batch in range(1, 60))
        most = max((one.tokens_per_second for one in every if one), default=0.0)
        assert most <= (best.tokens_per_second * 1.02 if best else 0.0), way


@given(st.floats(0.1, 100.0), st.floats(0.0, 1.0), st.floats(0.0, 0.1), st.integers(1, 3000))
def test_of_convex_times_the_best_batch_is_found(fixed, linear, square, most):
    def seconds(batch):
        return fixed + linear * batch + square * batch**2 if batch <= most else math.inf

    best = max(batch / seconds(batch) for batch in range(1, most + 1))
    found = best_batch(seconds)
    assert found / seconds(found) == pytest.approx(best, rel=1e-12)
    assert best_batch(lambda batch: math.inf) == 1


def test_a_model_without_hidden_states_has_two_ways_less():
    latent = dataclasses.replace(OPT_30B, kv_gen=math.inf)
    assert Ways(latent, Requests(10, 10), CPU).names == ("sglang", "ahead", "kv")
    assert Ways(OPT_30B, Requests(10, 10), CPU).names[3:] == ("act", "hybrid")


def test_a_pass_with_a_cpu_by_hand():
    """One resident layer of two; the CPU reads the other's weights and state, or computes it."""
    small = dataclasses.replace(OPT_30B, layers=2, device=1.9 * OPT_30B.weights)
    ways = Ways(small, Requests(1000, 100), CPU)
    tokens, weights = 1050, small.weights
    on_device = weights / 1008e9 + tokens * 28672 / 1008e9
    read = (weights + tokens * 28672) / 75e9
    prompts = max(
        weights / 25e9 / 100, 2 * (10 * weights + 10 * 1000 / 2 * 4 * 7168) / (0.35 * 330e12)
    )
    assert ways.cpu_seconds(1) == pytest.approx(on_device + read + prompts + OUTPUT_LAYER)
    # With the state of 200 the CPU has both layers, and its products take longer than its reads.
    assert ways.cpu_seconds(200) >= 2 * 200 * CPU.per_new
    assert ways.cpu_seconds(10**6) == math.inf


def test_the_batch_below_which_a_cpu_is_faster():
    ways = Ways(OPT_30B, Requests(1024, 128), CPU)

    def ours(batch):
        found = [ways.serve(way, batch) for way in ways.names]
        return min(one.seconds for one in found if one)

    below = ways.cpu_faster_below(1000)
    assert 1 < below < 1000
    assert ways.cpu_seconds(below - 1) < ours(below - 1)
    assert ways.cpu_seconds(below) >= ours(below)
    slow = dataclasses.replace(ways, cpu=Processor(1e6, 1e3))
    assert slow.cpu_faster_below(1000) == 1
    assert dataclasses.replace(ways, cpu=Processor(1e15, 1e-9)).cpu_faster_below(5) == 6
    # With more state than has room on the device, a CPU is faster than a narrow link; before, not.
    resident = dataclasses.replace(OPT_30B, device=49 * OPT_30B.weights, host=882e9)
    many = dataclasses.replace(ways, model=resident)
    assert many.cpu_seconds(60) < min(one.seconds for w in ways.names if (one := many.serve(w, 60)))
    assert many.cpu_faster_below(60) == 1


def test_served_tokens_are_those_of_the_answers():
    served = Served("sglang", Load(6, 1.0, 1.0), Split(), 1, PassTimes(1.0, 2.0))
    assert served.tokens_per_second == 2.0
