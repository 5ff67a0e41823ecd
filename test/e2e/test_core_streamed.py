"""State of running requests in host memory (`--hc-throughput`) under SGLang's real scheduler:
replies are those of SGLang alone, whatever share is kept as hidden states, wherever, in however
many rounds.

Rows really pass through places full of NaN, late (`support.streaming`).
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest

from sglang_hc.hybrid.units import Units
from support import streaming
from support.core import Once, run_in_child
from support.retractions import PROMPTS, retract_often
from support.spoiled_units import NeverWaits, ReadsTooEarly
from support.streaming import SOME, Told

slow = pytest.mark.slow


def alone(model: str, dtype: str) -> Told:
    return streaming.talk(streaming.plain(model, dtype))


def beside(
    model: str, spec: str, dtype: str = "float32", kind: type[Units] | None = None
) -> tuple[Told, dict[str, Any]]:
    core = streaming.streamed(model, spec, dtype=dtype, kind=kind or streaming.SpoiledUnits)
    told = streaming.talk(core)
    core.forget()
    slots = core.scheduler.token_to_kv_pool_allocator.slots
    found = streaming.backend_of(core).streamed.streaming
    assert (slots.act, slots.kv) == (found.act_tokens, found.tokens - found.act_tokens)
    return told, dataclasses.asdict(streaming.units_of(core).passed)


def cases() -> list[Any]:
    found = []
    for model in ("llama-mha", "llama-gqa", "opt", "qwen3"):
        # Hidden states of the second one are larger than its K and V; the last one is
        # grouped-query, too.
        for act in ("0",) if model == "llama-gqa" else ("0", "0.5", "1"):
            for rounds in (1, 3):
                for device in ("", SOME) if act != "0" else ("",):
                    spec = ",".join(filter(None, (f"act:{act}", f"rounds:{rounds}", device)))
                    often = (model, act, rounds, device) in OFTEN
                    found.append(pytest.param(model, spec, marks=() if often else slow))
    return found


OFTEN = {
    ("llama-mha", "0.5", 3, SOME),
    ("llama-mha", "1", 1, ""),
    ("llama-gqa", "0", 3, ""),
    ("opt", "0.5", 1, ""),
    ("qwen3", "0.5", 3, ""),
}
"""In every run; the others nightly."""


@pytest.mark.parametrize(("model", "spec"), cases())
def test_replies_are_sglangs_own(models: None, once: Once, model: str, spec: str) -> None:
    wanted: Told = once(alone, model, "float32")
    told, passed = run_in_child(beside, model, spec)
    assert told.replies == wanted.replies
    assert told.cached == wanted.cached and min(told.cached[1:]) > 60, "the prefix cache works"
    kinds = passed["rows"]
    assert bool(passed["kv_in"]) == bool(passed["kv_out"]) == ("act:1," not in spec)
    assert bool(kinds[0]) == (SOME in spec) and bool(kinds[1]) == ("act:0," not in spec)
    assert (passed["rounds"] > passed["passes"]) == ("rounds:3" in spec)


@pytest.mark.parametrize(
    "model", ["llama-gqa", *(pytest.param(m, marks=slow) for m in ("llama-mha", "qwen3", "opt"))]
)
def test_kv_form_is_bit_exact_in_bfloat16(models: None, once: Once, model: str) -> None:
    wanted: Told = once(alone, model, "bfloat16")
    told, _ = run_in_child(beside, model, "act:0,rounds:3", "bfloat16")
    assert told.replies == wanted.replies
    assert len(told.rows) == len(wanted.rows) == 8
    assert all(map(np.array_equal, told.rows, wanted.rows)) and len(told.rows[0]) > 90


def retracted(spec: str | None) -> tuple[list[list[int]], int]:
    """None: by SGLang alone, undisturbed."""
    if spec is None:
        core = streaming.plain("qwen3", "float32")
    else:
        retract_often()
        core = streaming.streamed("qwen3", spec)
    rids = [core.submit(tokens, 40) for tokens in PROMPTS]
    core.run()
    core.check_device()
    again = sum(req.retraction_count for req in core.arrived)
    return [core.reply(rid).tokens for rid in rids], again


@pytest.mark.parametrize(
    "spec",
    [f"act:0.5,rounds:3,{SOME}", *(pytest.param(f"act:{a},rounds:1", marks=slow) for a in "01")],
)
def test_retracted_requests_come_back(models: None, once: Once, spec: str) -> None:
    calm, none = once(retracted, None)
    found, retractions = run_in_child(retracted, spec)
    assert none == 0 and retractions > 2
    assert found == calm


def many(spec: str | None) -> list[list[int]]:
    flags = ("--max-total-tokens", "4096", "--chunked-prefill-size", "1024")
    if spec is None:
        return streaming.crowd(streaming.plain("qwen3", "float32", *flags), 200)
    core = streaming.streamed("qwen3", spec, *flags)
    found = streaming.crowd(core, 200)
    core.check_device()
    passed = streaming.units_of(core).passed
    assert passed.rounds > 2 * passed.passes
    return found


@slow
@pytest.mark.parametrize("spec", [f"act:0.5,rounds:8,{SOME}", "act:0,rounds:8", "act:1,rounds:8"])
def test_two_hundred_requests(models: None, once: Once, spec: str) -> None:
    assert run_in_child(many, spec) == once(many, None)


def products_of_its_own(spec: str) -> bool:
    """Whether the model has, where bit identity is had by no other product."""
    from sglang_hc.srt.model import exactness, model_state

    def choose(layers: Any, demanded: bool) -> Any:
        _, put = exactness.products_of(layers)[1]  # of a CPU: tiles
        put()
        return exactness.measure(layers)

    with mock.patch.object(model_state, "choose_product", choose):
        core = streaming.streamed("llama-mha", spec, dtype="bfloat16")
    return exactness.has_fixed_tiles(core.scheduler.tp_worker.model_runner.model)


@slow
@pytest.mark.parametrize("share", ["0", "0.5"])
def test_products_change_only_for_hidden_states(models: None, share: str) -> None:
    assert run_in_child(products_of_its_own, f"act:{share}") == (share != "0")


@pytest.mark.parametrize("mistake", [NeverWaits, pytest.param(ReadsTooEarly, marks=slow)])
def test_a_planted_mistake_is_found(models: None, once: Once, mistake: type[Units]) -> None:
    wanted: Told = once(alone, "llama-mha", "float32")
    told, _ = run_in_child(beside, "llama-mha", f"act:0.5,rounds:3,{SOME}", "float32", mistake)
    assert told.replies != wanted.replies
