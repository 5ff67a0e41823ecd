"""What a server says of its passes."""

from __future__ import annotations

import dataclasses

import pytest

from benchmark.throughput.paper import paper_model
from sglang_hc.hybrid.rows import Kinds
from sglang_hc.hybrid.units import Passed
from sglang_hc.metrics import COUNTS, LEVELS
from sglang_hc.policy.rounds import Surplus
from sglang_hc.policy.streamed_pass import Load, Split, steady
from sglang_hc.policy.streaming import Streaming
from sglang_hc.policy.streaming_plan import StreamingPlan
from sglang_hc.policy.streaming_report import Report
from sglang_hc.policy.throughput import Served

MODEL = dataclasses.replace(paper_model("30B"), weights=3e8, load_w=3e8 / 25e9)
SPLIT = Split(5e4, 2e4, 1e4)
LOAD = steady(64, 1024, 128)
PLAN = StreamingPlan(
    Streaming(90_000, 40_000, 10_000, 30_000, Surplus(1.0, -1.0)),
    MODEL,
    Served("hybrid", LOAD, SPLIT, 3, MODEL.times(LOAD, SPLIT, 3)),
)


def passed(passes: int) -> Passed:
    """Passes of 50,000 tokens as K and V, 20,000 as hidden states, and 10,000 that stay; each
    brings 60 tokens home as K and V and 40 as hidden states, keeps 20, and has three rounds."""
    layers = MODEL.layers
    return Passed(
        passes=passes,
        timed=passes,
        seconds=2.5 * passes,
        rounds=3 * passes,
        kv_in=int(passes * layers * 5e4 * MODEL.kv),
        act_in=int(passes * layers * 2e4 * MODEL.act),
        kv_out=int(passes * layers * 60 * MODEL.kv),
        act_out=int(passes * layers * 40 * MODEL.act),
        new=120 * passes,
        rows=Kinds(10_000 * passes, 20_000 * passes, 50_000 * passes),
    )


@pytest.mark.parametrize("passes", [1, 7])
def test_times_are_of_one_pass_whatever_their_number(passes: int) -> None:
    wanted = MODEL.times(Load(0, 8e4, 120), SPLIT, 3)
    found = Report(PLAN, passed(passes))
    assert found.times is not None and found.times == pytest.approx(wanted)
    stats = found.stats()
    assert stats["pass_seconds"] == pytest.approx(2.5)
    assert stats["bound"] == wanted.bound
    assert (stats["passes"], stats["rounds"]) == (passes, 3 * passes)
    assert stats["bytes"]["weights_in"] == passes * 48 * 3e8
    assert stats["bytes"]["kv_in"] == passes * 48 * 5e4 * 28672
    assert stats["planned"]["requests"] == 64


def test_before_the_first_pass_nothing_is_known_of_one() -> None:
    found = Report(PLAN, Passed())
    stats = found.stats()
    assert stats["pass_seconds"] is stats["link_seconds"] is stats["bound"] is None
    assert not any(found.counts().values())
    assert not any("seconds" in name for name in found.levels())


def test_every_number_has_a_metric() -> None:
    found = Report(PLAN, passed(1))
    assert found.levels().keys() == {one for one in LEVELS if one.startswith("throughput_")}
    assert found.counts().keys() == {one for one in COUNTS if one.startswith("throughput_")}
