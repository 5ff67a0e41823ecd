"""Weights in host memory (`--hc-offload-gb`) under SGLang's real scheduler: replies are those of
SGLang alone, and state that leaves the device comes back as ever.

Weights really pass through the ring, late and into places full of NaN (`support.offloading`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hc.device.weight_ring import WeightRing
from sglang_hc.profile_file import encode
from support import quantised
from support.core import MODELS, Core, Once, run_in_child
from support.offloading import (
    ALL,
    SOME,
    NeverWaits,
    RefillsTooEarly,
    Told,
    kept,
    offloaded,
    plainly,
    spoiled_weights,
    talk,
)
from support.profiles import cost_model
from support.prompts import SMALL, on_disk, prompt

ALL_4 = [0, 1, 2, 3]
MIXED = "recompute:1,hidden:1,kv:2"
CASES = [
    ("llama-mha", "hidden:2,kv:2", SOME),
    pytest.param("llama-mha", MIXED, ALL, marks=pytest.mark.slow),
    ("llama-gqa", "recompute:2,hidden:1,kv:1", SOME),
    pytest.param("llama-gqa", "hidden", ALL, marks=pytest.mark.slow),
    ("qwen3", MIXED, SOME),
    pytest.param("opt", "hidden:2,kv:2", ALL, marks=pytest.mark.slow),
    pytest.param("opt", "kv", SOME, marks=pytest.mark.slow),
    ("deepseek-v2", "recompute:2,kv:2", ALL),
    ("qwen3-moe", "kv", SOME),
]


@pytest.mark.parametrize(("model", "plan", "gib"), CASES)
def test_replies_are_sglangs_own(models: None, once: Once, model: str, plan: str, gib: str) -> None:
    plain: Told = once(plainly, model, "float32")
    found: Told = run_in_child(offloaded, model, "float32", plan, gib)
    assert found.replies == plain.replies
    assert found.hosted == (ALL_4 if gib == ALL else [0, 1, 2])
    assert found.host[0] == 0 and min(found.host[1:]) > 230
    assert found.stats["layer_plan"] == (plan if ":" in plan else f"{plan}:4")


@pytest.mark.parametrize(
    "model",
    [
        "llama-gqa",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("llama-mha", "qwen3", "opt")),
    ],
)
def test_kv_form_is_bit_exact_in_bfloat16(models: None, once: Once, model: str) -> None:
    plain: Told = once(plainly, model, "bfloat16")
    wanted: Told = run_in_child(kept, model, "bfloat16")
    found: Told = run_in_child(offloaded, model, "bfloat16", "kv", SOME)
    assert found.replies == wanted.replies == plain.replies
    assert all(map(np.array_equal, wanted.rows, found.rows)) and len(found.rows) == 8


def of_8_bits(run: Callable[..., Told], folder: str, *args: object) -> Told:
    quantised.use()
    return run(folder, "bfloat16", *args, "--quantization", "w8a8_int8")


@pytest.mark.slow
def test_quantised_weights_pass_through_the_ring_too(models: None, tmp_path: Path) -> None:
    """Whole numbers and their scales, which SGLang lays out anew behind the load."""
    folder = str(quantised.make(MODELS / "llama-gqa", tmp_path / "llama-int8"))
    wanted = run_in_child(of_8_bits, kept, folder)
    found = run_in_child(of_8_bits, offloaded, folder, "kv", SOME, WeightRing)
    assert found.hosted == [0, 1, 2]
    assert found.replies == wanted.replies
    assert all(map(np.array_equal, wanted.rows, found.rows)) and len(found.rows) == 8


def test_several_requests_in_chunks_and_mixed_passes(models: None) -> None:
    """More than one pass for each prompt, and decode steps beside them."""
    wanted = run_in_child(crowd, ())
    assert run_in_child(crowd, ("--hc-offload-gb", SOME)) == wanted


def crowd(flags: tuple[str, ...]) -> list[list[int]]:
    with spoiled_weights():
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

    with spoiled_weights():
        core = Core("--hc-offload-gb", ALL, "--hc-forms", MIXED, *SMALL, model="llama-gqa")
    before = talk(core, evict=True).replies
    tiers = core.tree.tiers
    recomputer = tiers.restorer.path.recomputer
    layers = core.scheduler.tp_worker.model_runner.model.model.layers
    core.evict()
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
    core.forget()
    return before, talk(core, evict=True).replies, errors


@pytest.mark.parametrize("mistake", [NeverWaits, RefillsTooEarly])
def test_a_planted_mistake_is_found(models: None, once: Once, mistake: type[WeightRing]) -> None:
    plain: Told = once(plainly, "llama-gqa", "float32")
    found: Told = run_in_child(offloaded, "llama-gqa", "float32", "kv", ALL, mistake)
    assert found.replies != plain.replies
    assert not all(np.isfinite(part.view(np.float32)).all() for part in found.rows)


@pytest.mark.parametrize("model", ["gpt2", "gemma", "granite"])
def test_layers_that_are_built_in_one_piece_are_refused(models: None, model: str) -> None:
    with pytest.raises(AssertionError, match=r"--hc-offload-gb: SGLang builds .* in one piece.*le"):
        run_in_child(offloaded, model, "float32", "kv")


def on_disk_below(directory: str, *flags: str) -> tuple[list[int], int]:
    with spoiled_weights():
        core = Core("--hc-forms", "kv", *SMALL, *on_disk(directory), *flags, model="llama-gqa")
    reply = core.ask(prompt(2, 230), 16)
    core.settle()
    return reply.tokens, reply.storage


def test_what_was_stored_without_is_found_with_weights_in_host_memory(
    models: None, tmp_path: Path
) -> None:
    """The same model computes the same state, wherever its weights lie."""
    first, found = run_in_child(on_disk_below, str(tmp_path / "d"))
    assert found == 0
    again = run_in_child(on_disk_below, str(tmp_path / "d"), "--hc-offload-gb", ALL)
    assert again == (first, 192)


def sizes(profile: str, *flags: str) -> tuple[int, float, float]:
    """Tokens of a pass, and what a layer takes for so many and its weights take to come."""
    core = Core("--hc-offload-gb", ALL, *SMALL, *flags, profile=profile)
    chunk, cost = core.scheduler.chunked_prefill_size, core.model_state.cost
    assert cost.pass_tokens == chunk
    return chunk, cost.prefill.seconds(chunk, 0), cost.weights


def test_passes_grow_until_computing_takes_as_long_as_the_weights(
    models: None, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(encode(cost_model(host=1e-5, project=1e-6, prefill=1e-6)))
    chunk, computing, weights = run_in_child(sizes, str(profile))
    assert 4096 < chunk <= 16384 and chunk % 4096 == 0
    assert computing >= weights > computing * (chunk - 4096) / chunk
    given, _, _ = run_in_child(sizes, str(profile), "--chunked-prefill-size", "256")
    assert given == 256


@pytest.mark.parametrize(("layers", "wanted"), [(None, []), (4, []), (3.5, [0, 1, 2]), (2, ALL_4)])
def test_auto_leaves_in_host_memory_what_does_not_fit(
    models: None, once: Once, layers: float | None, wanted: list[int]
) -> None:
    """layers: for how many the device has room; None: what a CPU says of itself."""
    plain: Told = once(plainly, "llama-gqa", "float32")
    found: Told = run_in_child(with_room, layers)
    assert found.hosted == wanted and found.replies == plain.replies


def test_auto_is_refused_where_nothing_helps(models: None) -> None:
    with pytest.raises(
        AssertionError, match=r"--hc-offload-gb auto: .* smaller --max-total-tokens"
    ):
        run_in_child(with_room, 1.9)


def with_room(layers: float | None) -> Told:
    from sglang_hc.srt.model import offload

    if layers is not None:
        fitting = offload.fitting
        offload.fitting = lambda _, sizes: fitting(int(layers * sizes[0]), sizes)
    return offloaded("llama-gqa", "float32", "hidden:2,kv:2", "auto")
