"""Weights in host memory (`--hc-offload-gb`) under SGLang's real scheduler: replies are those of
SGLang alone, and state that leaves the device comes back as ever.

Weights really pass through the ring, late and into places full of NaN (`support.offloading`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_hc.device.weight_ring import WeightRing
from support.core import Core, Once, run_in_child
from support.offloading import (
    ALL,
    SOME,
    NeverWaits,
    RefillsTooEarly,
    Told,
    kept,
    offloaded,
    plainly,
    spoiled,
    talk,
)
from support.prompts import SMALL, prompt

MIXED = "recompute:1,hidden:1,kv:2"
CASES = [
    ("llama-mha", "hidden:2,kv:2", SOME),
    ("llama-mha", MIXED, ALL),
    ("llama-gqa", "recompute:2,hidden:1,kv:1", SOME),
    ("llama-gqa", "hidden", ALL),
    ("qwen3", MIXED, SOME),
    ("opt", "hidden:2,kv:2", ALL),
    ("opt", "kv", SOME),
    ("deepseek-v2", "recompute:2,kv:2", ALL),
    ("qwen3-moe", "kv", SOME),
]


@pytest.mark.parametrize(("model", "plan", "gib"), CASES)
def test_replies_are_sglangs_own(models: None, once: Once, model: str, plan: str, gib: str) -> None:
    plain: Told = once(plainly, model, "float32")
    found: Told = run_in_child(offloaded, model, "float32", plan, gib)
    assert found.replies == plain.replies
    assert found.hosted == ([0, 1, 2, 3] if gib == ALL else [0, 1, 2])
    assert found.host[0] == 0 and min(found.host[1:]) > 230
    assert found.stats["layer_plan"] == (plan if ":" in plan else f"{plan}:4")


@pytest.mark.parametrize("model", ["llama-mha", "llama-gqa", "qwen3", "opt"])
def test_kv_form_is_bit_exact_in_bfloat16(models: None, once: Once, model: str) -> None:
    plain: Told = once(plainly, model, "bfloat16")
    wanted: Told = run_in_child(kept, model, "bfloat16")
    found: Told = run_in_child(offloaded, model, "bfloat16", "kv", SOME)
    assert found.replies == wanted.replies == plain.replies
    assert all(map(np.array_equal, wanted.rows, found.rows)) and len(found.rows) == 8


def test_several_requests_in_chunks_and_mixed_passes(models: None) -> None:
    """More than one pass for each prompt, and decode steps beside them."""
    wanted = run_in_child(crowd, ())
    assert run_in_child(crowd, ("--hc-offload-gb", SOME)) == wanted


def crowd(flags: tuple[str, ...]) -> list[list[int]]:
    with spoiled():
        core = Core(
            *("--hc-forms", "hidden:2,kv:2", *SMALL, "--chunked-prefill-size", "64", *flags),
            model="llama-gqa",
        )
    assert core.scheduler.is_mixed_chunk == bool(flags)
    found = []
    for _ in range(2):
        rids = [core.submit(prompt(n, 60 + 40 * n), 12) for n in range(4)]
        core.run()
        found += [core.reply(rid).tokens for rid in rids]
        core.push_out()
    core.settle()
    return found


def test_a_pass_that_is_left_early_does_no_harm(models: None) -> None:
    before, after, errors = run_in_child(left_early)
    assert before == after and errors == 6


def left_early() -> tuple[Any, Any, int]:
    """Passes that end by an exception before a layer, in each of them and in its midst."""
    import torch

    with spoiled():
        core = Core("--hc-offload-gb", ALL, "--hc-forms", MIXED, *SMALL, model="llama-gqa")
    before = talk(core, evict=True).replies
    tiers = core.tree.tiers
    recomputer = tiers.restorer.path.recomputer
    layers = core.scheduler.tp_worker.model_runner.model.model.layers
    slots = core.scheduler.token_to_kv_pool_allocator.alloc(32)
    errors = 0
    for number in range(3):
        for part in (layers[number], layers[number].mlp):

            def fail(*_: object) -> None:
                raise MemoryError("no room for activations")

            hook = part.register_forward_pre_hook(fail)
            try:
                recomputer.recompute(torch.arange(32), slots, 4)
            except MemoryError:
                errors += 1
            hook.remove()
    core.scheduler.token_to_kv_pool_allocator.free(slots)
    core.push_out()
    core.forget()
    return before, talk(core, evict=True).replies, errors


@pytest.mark.parametrize("mistake", [NeverWaits, RefillsTooEarly])
def test_a_planted_mistake_is_found(models: None, once: Once, mistake: type[WeightRing]) -> None:
    plain: Told = once(plainly, "llama-gqa", "float32")
    found: Told = run_in_child(offloaded, "llama-gqa", "float32", "kv", ALL, mistake)
    assert found.replies != plain.replies
    assert not all(np.isfinite(part.view(np.float32)).all() for part in found.rows)
