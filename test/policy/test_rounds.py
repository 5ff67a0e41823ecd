"""Running requests in rounds that share two places on the device."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.throughput.paper import paper_model
from sglang_hc.policy.hybrid import best_split
from sglang_hc.policy.rounds import Rows, Surplus, imbalance, pack, sum_rows, surplus
from sglang_hc.policy.streamed_pass import Load

PLACE = Rows(1000, 600)
requests = st.lists(
    st.builds(Rows, st.integers(0, PLACE.kv), st.integers(0, PLACE.act)), max_size=60
)
prices = st.builds(Surplus, st.floats(-1.0, 1.0), st.floats(-1.0, 1.0))


def first_come(running: list[Rows], place: Rows) -> list[list[int]]:
    """A round ends before the first request that does not fit."""
    rounds: list[list[int]] = [[]]
    for index, rows in enumerate(running):
        if not sum_rows([rows, *(running[member] for member in rounds[-1])]).within(place):
            rounds.append([])
        rounds[-1].append(index)
    return rounds


@given(requests, prices)
def test_every_request_is_in_one_round_and_no_place_overflows(running, by):
    rounds = pack(running, PLACE, by)
    assert sorted(index for one in rounds for index in one) == list(range(len(running)))
    assert all(one and sum_rows([running[i] for i in one]).within(PLACE) for one in rounds)


@given(requests, prices)
def test_there_is_one_round_where_all_rows_fit(running, by):
    rounds = pack(running, sum_rows(running), by)
    assert rounds == ([list(range(len(running)))] if running else [])


def nearest_first(running: list[Rows], place: Rows, by: Surplus) -> list[list[int]]:
    """Of all requests that fit, the one that leaves the round best balanced, looked for one by
    one."""
    waiting, rounds = set(range(len(running))), []
    while waiting:
        rounds.append([])
        while True:
            filled = [running[index] for index in rounds[-1]]
            fitting = [i for i in waiting if sum_rows([*filled, running[i]]).within(place)]
            if not fitting:
                break
            found = min(fitting, key=lambda i: abs(by.of(sum_rows([*filled, running[i]]))))
            waiting.remove(found)
            rounds[-1].append(found)
    return rounds


@given(st.lists(st.builds(Rows, st.integers(0, 1000), st.integers(0, 600)), max_size=25))
def test_each_round_takes_what_balances_it_best(running):
    by = Surplus(math.sqrt(2), -math.sqrt(3))  # only equal requests have equal surplus
    ways = first_come(running, PLACE), nearest_first(running, PLACE, by)
    least = min(imbalance(running, rounds, by) for rounds in ways)
    if len(ways[0]) > 1:
        assert imbalance(running, pack(running, PLACE, by), by) == pytest.approx(least)


def batch(rng: random.Random) -> tuple[list[Rows], Surplus]:
    """Requests of several lengths whose ratios scatter around that of the best split, as shared
    prefixes and retractions leave them; and what their rows cost."""
    model = paper_model("30B")
    lengths = [rng.randint(200, 2000) for _ in range(rng.randint(40, 200))]
    load = Load(len(lengths), sum(lengths), len(lengths))
    split = best_split(model, load, 8, most_resident=0)
    share = split.act / load.tokens
    acts = [round(tokens * min(1.0, share * rng.uniform(0.5, 1.5))) for tokens in lengths]
    running = [Rows(tokens - act, act) for tokens, act in zip(lengths, acts, strict=True)]
    return running, surplus(model, load, split)


def test_rounds_are_better_balanced_than_those_in_order():
    """Never worse in 1,000 batches. Of the waiting that is not the whole pass's own, less than a
    quarter is left."""
    rng, avoidable, left = random.Random(7), 0.0, 0.0
    for _ in range(1000):
        running, by = batch(rng)
        whole = sum_rows(running)
        place = Rows(whole.kv // 6 + 2000, whole.act // 6 + 2000)
        ours, order = (
            imbalance(running, rounds, by)
            for rounds in (pack(running, place, by), first_come(running, place))
        )
        assert ours <= order
        left += ours - abs(by.of(whole))
        avoidable += order - abs(by.of(whole))
    assert left < avoidable / 4, (left, avoidable)


def test_the_rows_of_a_balanced_pass_have_no_surplus():
    model = paper_model("30B")
    load = Load(128, 128 * 1088, 128)
    split = best_split(model, load, 8, most_resident=0)
    assert split.host_act > 0 < split.device_act
    by = surplus(model, load, split)
    rest = by.kv * split.host_kv + by.act * split.act
    link, compute = model.times(load, split)
    assert model.layers * rest == pytest.approx(link - compute + model.layers * model.per_round)


def test_a_request_that_is_larger_than_a_place_is_refused():
    with pytest.raises(ValueError, match=r"Rows\(kv=1001, act=0\) do not fit"):
        pack([Rows(1, 1), Rows(1001, 0)], PLACE, Surplus(1.0, -1.0))
