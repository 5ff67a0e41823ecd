"""What a plan of streamed state is made of: measured costs, and the room that weights leave."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hc.config import GIB, HcConfig
from sglang_hc.forms import StateShape
from sglang_hc.policy.correction import Resource
from sglang_hc.policy.fit import Fit, StepFit
from sglang_hc.policy.streamed_pass import ROUND_SECONDS
from sglang_hc.policy.streaming import ThroughputSpec
from sglang_hc.srt.model import offload, scratch_layer, throughput_plan
from sglang_hc.srt.model.offload import HostedWeights
from support.profiles import cost_model

LAYERS, LAYER = 8, 4 << 20
SHAPE = StateShape(LAYERS, 512, (512, 512), "bfloat16")
COSTS = replace(
    cost_model(host=1e-6, project=3e-6),
    prefill=Fit(1e-3, 2e-6, 3e-9, per_context=4e-9, floor=5e-3),
    project=Fit(0.0, 3e-6, floor=7e-5),
)
PLACE = torch.empty(LAYER, dtype=torch.uint8)


class Ring:
    """Six of eight layers."""

    bytes = 6 * LAYER
    places = (PLACE, PLACE)

    def numbers(self) -> dict[int, int]:
        return {}


WEIGHTS = HostedWeights(Ring(), {}, LAYERS)  # type: ignore[arg-type]
RUNNER: Any = SimpleNamespace(
    model=None,
    dtype=torch.bfloat16,
    device="cuda",
    gpu_id=0,
    model_config=SimpleNamespace(hidden_size=256, context_len=4096, vocab_size=1000),
    server_args=None,
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of whose weights a token passes through a quarter; 10 GiB are free on the device, 100
    in host memory."""
    for name, value in (
        ("model_shape", SHAPE), ("layer_bytes", float(LAYER)), ("layer_weights", 1e6),
        ("stored_weights", 4e6), ("device_room", 10 * GIB),
    ):  # fmt: skip
        monkeypatch.setattr(throughput_plan, name, lambda _, value=value: value)
    monkeypatch.setattr(throughput_plan, "available_memory", lambda: 100 * GIB)
    arguments = SimpleNamespace(
        of=lambda runner: None, pool_tokens=lambda args: None, most_running=lambda args: 9
    )
    monkeypatch.setattr(throughput_plan, "arguments", arguments)
    monkeypatch.setattr(offload, "arguments", arguments)


def setting(spec: str = "auto", no_hidden: str | None = None) -> Any:
    parsed = ThroughputSpec.parse(spec)
    return throughput_plan._setting(RUNNER, parsed, COSTS, WEIGHTS, no_hidden)


def test_costs_are_those_that_were_measured() -> None:
    model = setting().served
    assert (model.layers, model.kv, model.act) == (LAYERS, 1024, 512)
    assert model.weights == 0.75 * LAYER, "six of eight cross"
    assert model.load_w == pytest.approx(model.weights * 1e-6 / 1024)
    assert model.load_kv == pytest.approx(1e-6) and model.load_act == pytest.approx(5e-7)
    assert model.kv_gen == pytest.approx(3e-6, rel=0.01)
    assert (model.per_new, model.per_pair, model.read_kv) == (2e-6, 3e-9, 4e-9)
    assert model.active == 0.25 and model.read_w * model.active == pytest.approx(5e-3)
    assert model.per_round == ROUND_SECONDS + 7e-5
    assert model.outside == pytest.approx(model.read_w * 1000 * 512 / LAYER)


def test_decode_steps_that_a_profile_has_timed_count() -> None:
    """Attention of a step may read K and V more slowly than that of a prompt does."""
    timed = replace(COSTS, step=StepFit(Fit(1e-3, 1e-4), per_context=3e-8))
    found = throughput_plan._setting(RUNNER, ThroughputSpec(), timed, WEIGHTS, None).served
    assert found == replace(setting().served, read_kv=3e-8)


def test_learned_factors_count() -> None:
    slow = replace(COSTS, learned={Resource.KV_COPY: 2.0})
    found = throughput_plan._setting(RUNNER, ThroughputSpec(), slow, WEIGHTS, None).served
    assert found.load_kv == pytest.approx(2e-6)


def test_rooms_are_what_is_left_beside_the_weights() -> None:
    found = setting()
    hosted = 6 * LAYER
    assert found.served.host == found.whole.host == pytest.approx(80 * GIB + hosted)
    assert found.served.device - found.served.ring(0) == pytest.approx(10 * GIB)
    assert found.whole.device == 10 * GIB + 2 * LAYER + 2 * LAYER, "places, and two that stay"
    assert found.whole.weights == LAYER and found.whole.load_w == pytest.approx(LAYER * 1e-6 / 1024)
    assert (found.longest, found.running, found.tokens, found.is_apart) == (4096, 9, None, True)
    given = setting("host-gb:7,device-gb:2")
    assert given.served.host == 7 * GIB + hosted
    assert given.served.device - given.served.ring(0) == pytest.approx(2 * GIB)


@pytest.mark.parametrize(("no_hidden", "hidden"), [("quantised", 512), (None, 2048)])
def test_without_hidden_states_nothing_is_projected(
    monkeypatch: pytest.MonkeyPatch, no_hidden: str | None, hidden: int
) -> None:
    """Nor where they are larger than K and V."""
    shape = replace(SHAPE, hidden_bytes=hidden)
    monkeypatch.setattr(throughput_plan, "model_shape", lambda _: shape)
    assert math.isinf(setting(no_hidden=no_hidden).served.kv_gen)


def test_auto_leaves_a_quarter_of_the_device_for_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "device_room", lambda _: 60 * GIB)
    monkeypatch.setattr(offload, "model_shape", lambda _: SHAPE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 80 * GIB))
    config = HcConfig(offload_gb="auto", throughput="auto")
    assert offload._room(RUNNER, config) == 40 * GIB
    config = HcConfig(offload_gb="auto", throughput="act:0,device-gb:5")
    assert offload._room(RUNNER, config) == 55 * GIB
    assert offload._room(RUNNER, HcConfig(offload_gb="auto")) == 40 * GIB


def test_of_experts_a_token_passes_through_those_that_it_is_routed_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = torch.nn.Module()
    experts.w13_weight = torch.nn.Parameter(torch.zeros(8, 6, 4, dtype=torch.bfloat16))
    experts.w2_weight = torch.nn.Parameter(torch.zeros(8, 4, 3, dtype=torch.bfloat16))
    experts.top_k, experts.num_local_experts = 2, 8
    experts.hidden_size, experts.intermediate_size_per_partition = 4, 3
    model = torch.nn.ModuleList([experts])
    monkeypatch.setattr(scratch_layer, "_layers_in", lambda model: model)
    monkeypatch.setattr(scratch_layer, "_layers_of", lambda model: 1)
    assert scratch_layer.layer_weights(model) == 3 * 2 * 4 * 3
    assert scratch_layer.stored_weights(model) == 3 * 8 * 4 * 3
    assert scratch_layer.layer_bytes(model) == 2 * 3 * 8 * 4 * 3
