"""What is settled of state in host memory: it fits, it is what was forced, and nothing of what was
left open would be faster."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.throughput.paper import paper_model
from sglang_hc.errors import ConfigError
from sglang_hc.memory import GIB
from sglang_hc.policy.rounds import surplus
from sglang_hc.policy.streamed_pass import PLACES, StreamedModel
from sglang_hc.policy.streaming import UNMEASURED, ThroughputSpec
from sglang_hc.policy.streaming_plan import (
    AUTO,
    Setting,
    StreamingPlan,
    comparison,
    lines,
    refuse_slower,
    settle,
)
from sglang_hc.policy.throughput import Processor, Requests
from support.examples import examples
from support.streamed import streamed_models

CPU = Processor(75e9, 2 * 12 * 7168**2 / 1.5e12)
SLOW_CPU = Processor(1.0, 1e3)


def setting(model: StreamedModel, **changed: Any) -> Setting:
    """All layers cross, and nothing else was chosen."""
    plain = {
        "served": model, "whole": model, "requests": Requests(1024, 128), "cpu": CPU,
        "longest": 2048, "tokens": None, "running": None, "is_apart": True, "no_hidden": None,
    }  # fmt: skip
    return Setting(**{**plain, **changed})


def host_bytes(plan: StreamingPlan) -> float:
    model, found = plan.model, plan.streaming
    rows = model.kv * (found.tokens - found.act_tokens)
    rows += model.act * (found.act_tokens - found.device_act)
    return model.layers * (model.weights + rows)


def device_bytes(plan: StreamingPlan) -> float:
    model, found = plan.model, plan.streaming
    place = model.kv * found.rows + model.act * min(found.rows, found.act_tokens)
    kept = model.layers * model.act * found.device_act
    return model.ring(0) + kept + PLACES * place


specs = st.builds(
    ThroughputSpec,
    act=st.none() | st.sampled_from([0.0, 0.3, 1.0]),
    rounds=st.none() | st.integers(1, 6),
    device_act_gb=st.none() | st.floats(0.0, 1e-5),
)


@settings(max_examples=examples(150), deadline=None)
@given(
    model=streamed_models(),
    spec=specs,
    requests=st.builds(Requests, st.integers(1, 60), st.integers(1, 20)),
    longest=st.integers(1, 200),
    tokens=st.none() | st.integers(100, 4000),
    is_apart=st.booleans(),
)
def test_what_is_settled_fits_and_is_what_was_forced(
    model: StreamedModel,
    spec: ThroughputSpec,
    requests: Requests,
    longest: int,
    tokens: int | None,
    is_apart: bool,
) -> None:
    here = setting(
        model, requests=requests, longest=longest, tokens=tokens, is_apart=is_apart, cpu=SLOW_CPU
    )
    try:
        plan = settle(here, spec)
    except ConfigError as refused:
        assert str(refused).startswith("--hc-throughput")
        return
    found = plan.streaming
    assert device_bytes(plan) <= model.device * (1 + 1e-9)
    assert found.rows >= min(longest, found.tokens)
    assert tokens is None or found.tokens == tokens
    if tokens is None:
        row = model.layers * max(model.kv, model.act)  # the kinds are rounded to whole tokens
        assert host_bytes(plan) <= model.host * (1 + 1e-9) + row
    if spec.act is not None:
        assert found.act == pytest.approx(spec.act, abs=1 / found.tokens)
    if spec.rounds is not None:
        wanted = math.ceil(found.tokens / spec.rounds)
        assert found.rows == max(wanted, min(longest, found.tokens))
    most = None if is_apart else 0
    if spec.device_act_gb is not None:
        most = int(spec.device_act_gb * GIB / (model.layers * model.act))
    if most is not None:
        assert found.device_act == min(most, found.act_tokens)
        assert plan.served.split.device_act <= most
    if math.isfinite(model.kv_gen):
        assert found.balance == surplus(model, plan.served.load, plan.served.split)
    else:
        assert found.balance == UNMEASURED


@settings(max_examples=examples(40), deadline=None)
@given(model=streamed_models(), requests=st.builds(Requests, st.integers(1, 60), st.integers(1, 9)))
def test_no_share_of_eleven_is_faster_than_the_settled_one(
    model: StreamedModel, requests: Requests
) -> None:
    here = setting(model, requests=requests, longest=1, cpu=SLOW_CPU)
    try:
        plan = settle(here, ThroughputSpec())
    except ConfigError:
        return
    batch, rounds = plan.served.load.requests, [plan.served.rounds]
    others = [here.streams(AUTO).stream(batch, tenth / 10, rounds) for tenth in range(11)]
    fastest = min((one.seconds for one in others if one is not None), default=math.inf)
    assert plan.served.seconds <= fastest * (1 + 1e-9)


def test_opt_30b_on_the_papers_machine() -> None:
    """Both kinds, in the ratio that balances link and device; host memory is full."""
    model = dataclasses.replace(paper_model("30B"), host=200e9)
    plan = settle(setting(model), ThroughputSpec())
    assert 0.2 < plan.streaming.act < 0.8 and plan.served.times.bound == "balanced"
    assert host_bytes(plan) == pytest.approx(200e9, rel=1e-3)
    assert plan.streaming.rows >= 2048


def test_a_specification_leaves_no_room_for_a_plan() -> None:
    model, spec = paper_model("30B"), ThroughputSpec.parse("act:0.25,rounds:3,device-act-gb:1")
    found = settle(setting(model, tokens=6000), spec).streaming
    assert (found.tokens, found.act_tokens, found.rows) == (6000, 1500, 2048)
    assert found.device_act == min(1500, int(GIB / 48 / 14336))


def test_the_running_requests_that_a_user_allows_are_planned_for() -> None:
    model = paper_model("30B")
    assert settle(setting(model, running=7), ThroughputSpec()).served.load.requests <= 7
    assert settle(setting(model, tokens=1152 * 5), ThroughputSpec()).served.load.requests <= 5


def auto(here: Setting) -> list[str]:
    plan, found = settle(here, ThroughputSpec()), comparison(here)
    assert found is not None
    refuse_slower(here, plan, found)
    return lines(here, plan, found)


def test_where_streaming_is_fastest_it_is_served_and_said() -> None:
    said = auto(setting(dataclasses.replace(paper_model("30B"), host=200e9)))
    assert said[0].startswith("modelled by the costs of this machine, 1024 prompt tokens")
    assert [line.split("  ")[0] for line in said[2:7]] == [
        "SGLang's own", "weights ahead", "KV", "ACT", "hybrid"
    ]  # fmt: skip
    assert "fastest without the CPU: hybrid" in said
    assert not any("kt-weight-path" in line for line in said)


def test_more_layers_on_the_device_are_recommended_where_they_help() -> None:
    """All of them cross here, and there would be room for some."""
    model = dataclasses.replace(paper_model("30B"), host=64e9, device=40e9)
    plan = settle(setting(model), ThroughputSpec())
    (better,) = [line for line in auto(setting(model)) if line.startswith("with --hc-offload-gb")]
    size = float(better.split()[2])
    wanted = dataclasses.replace(model, weights=size * GIB / model.layers)
    wanted = dataclasses.replace(wanted, load_w=wanted.weights / 25e9)
    resident = model.layers * (model.weights - wanted.weights)
    wanted = dataclasses.replace(
        wanted, device=40e9 - resident - 2 * (model.weights - wanted.weights)
    )
    found = settle(setting(wanted, whole=model), ThroughputSpec()).served.tokens_per_second
    assert found > 1.1 * plan.served.tokens_per_second
    assert f"at {found:.3g} tokens/s" in better


def test_of_experts_the_other_way_is_said() -> None:
    sparse = dataclasses.replace(paper_model("30B"), host=200e9, active=0.1)
    assert any("--kt-weight-path" in line for line in auto(setting(sparse)))


def test_when_a_cpu_is_faster_is_said() -> None:
    fast = Processor(1e12, 1e-9)
    said = auto(setting(dataclasses.replace(paper_model("30B"), host=200e9), cpu=fast))
    assert any("a CPU that computes the rest" in line for line in said)
