"""Passes that grow where weights come from host memory: what bounds them, and what they take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hc.forms import LayerPlan, StateShape
from sglang_hc.policy.cost_model import CostModel
from sglang_hc.srt.binding.arguments import PassSizes
from sglang_hc.srt.model import offload_costs
from sglang_hc.srt.ranks.start_group import StartGroup
from support.profiles import cost_model

ALONE = StartGroup(0, 1)
SHAPE = StateShape(4, 64, (64, 64), "bfloat16")
RUNNER = SimpleNamespace(
    model=None,
    dtype=torch.bfloat16,
    device="cuda",
    model_config=SimpleNamespace(hidden_size=10, num_hidden_layers=4),
    server_args=None,
)
COMPUTED = 2 * 100 * 2
"""Bytes of activations of a token: of 1,000 weights, 100 for each of 10 columns."""
COST = replace(cost_model(prefill=1e-6), weights=5e-3)
HIDDEN, KV = LayerPlan(0, 4, 0), LayerPlan(0, 0, 4)


class Arguments:
    """SGLang's, of which only these are asked. grown: what was put in their place."""

    def __init__(self, given: bool = False, exchanges: bool = False) -> None:
        self.given, self.exchanges = given, exchanges
        self.grown: tuple[int, float] | None = None

    def of(self, runner: Any) -> Any:
        return runner.server_args

    def pass_sizes(self, args: Any) -> PassSizes:
        return PassSizes(2048, 16_384, True, 8, 0)

    def chunk_was_given(self, args: Any) -> bool:
        return self.given

    def exchanges_tokens(self, args: Any) -> bool:
        return self.exchanges

    def first_gpu(self, args: Any) -> tuple[int, float]:
        return 0, 0.9

    def grow_chunk(self, args: Any, tokens: int, static: float) -> None:
        self.grown = tokens, static


def grow(
    patch: pytest.MonkeyPatch, arguments: Arguments, plan: LayerPlan, device: int | None = 1 << 30
) -> CostModel:
    patch.setattr(offload_costs, "arguments", arguments)
    patch.setattr(offload_costs, "_device_bytes", lambda runner: device)
    patch.setattr(offload_costs, "layer_weights", lambda model: 1000)
    patch.setattr(offload_costs, "model_shape", lambda runner: SHAPE)
    found = offload_costs.grow_chunk(RUNNER, COST, plan, ALONE)
    assert found is not None
    return found


@pytest.mark.parametrize("plan", [HIDDEN, KV])
def test_sglang_leaves_room_for_activations_and_finds_the_taps_taken(
    monkeypatch: pytest.MonkeyPatch, plan: LayerPlan
) -> None:
    arguments = Arguments()
    assert grow(monkeypatch, arguments, plan).pass_tokens == 6144
    assert arguments.grown == (6144, pytest.approx(0.9 - COMPUTED * 4096 / (1 << 30)))


def test_taps_count_in_what_a_longer_pass_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    taps = 4 * SHAPE.hidden_bytes
    device = 8 * 2048 * (COMPUTED + taps)
    assert grow(monkeypatch, Arguments(), HIDDEN, device).pass_tokens == 4096
    assert grow(monkeypatch, Arguments(), HIDDEN, device - 8).pass_tokens == 2048
    assert grow(monkeypatch, Arguments(), KV, device).pass_tokens == 4096


@pytest.mark.parametrize("arguments", [Arguments(given=True), Arguments(exchanges=True)])
def test_passes_that_were_sized_do_not_grow(
    monkeypatch: pytest.MonkeyPatch, arguments: Arguments
) -> None:
    """By the user, or by buffers through which experts exchange tokens."""
    found = grow(monkeypatch, arguments, KV)
    assert found.pass_tokens == 2048 and arguments.grown is None
