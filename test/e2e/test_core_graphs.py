"""Capture and restoration when the model runs by CUDA graphs, on a graph without CUDA.

`support/graph_mock.py` says what of a graph is imitated. The controls are mistakes that only show
under graphs: a tap that keeps what it was handed, and a gate inside a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.core import run_in_child
from support.graph_mock import GraphCore
from support.prompts import SMALL, prompt

FLAGS = (*SMALL, "--chunked-prefill-size", "128")
TOLERANCE = 1e-4
"""Relative, in float32: a product of more rows may round otherwise."""


def tap_by_reference(core: GraphCore) -> None:
    """The tap keeps the tensor it is handed, and the rows are read from there after the pass."""
    taps = core.tree.tiers.capture.taps
    handed: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(core.model_state.layers):
        layer.qkv._forward_pre_hooks.clear()
        layer.qkv._forward_pre_hooks_with_kwargs.clear()
        layer.qkv.register_forward_pre_hook(
            lambda _module, args, index=index: handed.update({index: args[0]})
        )

    def rows_of(rows: int) -> torch.Tensor:
        row = torch.arange(rows)
        latest = [handed[i][row % len(handed[i])] for i in range(len(handed))]
        return torch.stack(latest).view(torch.uint8)

    taps.bytes = rows_of


def served(
    flags: tuple[str, ...], backend: str, control: Callable[[GraphCore], None] | None = None
) -> dict[str, Any]:
    """Three conversations at once, evicted, and their second turns. How far is what came back from
    what was there, relative to the largest value?"""
    core = GraphCore(*FLAGS, *flags, backend=backend)
    if control is not None:
        control(core)
    taken: list[int] = []
    after_pass = core.tree.tiers.after_pass

    def noting(segments: Any) -> None:
        if segments:
            taken.append(max(s.row + s.rows for s in segments))
        after_pass(segments)

    core.tree.tiers.after_pass = noting
    prompts = [prompt(i, 100 + 33 * i) for i in range(3)]
    rids = [core.submit(tokens, 20) for tokens in prompts]
    core.run()
    whole = [[*t, *core.reply(rid).tokens] for t, rid in zip(prompts, rids, strict=True)]
    kept = [core.kv(tokens) for tokens in whole]
    batches = [event for event in core.events if event[0] == "rows"]
    taken, passes = [], list(taken)
    core.settle()
    core.push_out()
    core.events.clear()
    replies, errors = [], []
    for tokens, before in zip(whole, kept, strict=True):
        replies.append(core.ask([*tokens, *prompt(9, 40)], 8))
        errors.append(distance(before, core.kv(tokens)))
    core.settle()
    return {
        "batches": batches,
        "passes": passes,
        "events": core.events,
        "host": [reply.host for reply in replies],
        "tokens": [reply.tokens for reply in replies],
        "error": max(errors),
    }


def distance(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """Largest difference of the rows both have, relative; infinite where something is no number."""
    found = 0.0
    for old, new in zip(before, after, strict=True):
        rows = min(len(old), len(new))
        difference = (old[:rows] - new[:rows]).abs().max() / old.abs().max()
        found = max(found, float(difference.nan_to_num(float("inf"))))
    return found


@pytest.fixture(scope="module")
def breakable(models: None) -> dict[str, Any]:
    return run_in_child(served, ("--hc-forms", "hidden"), "breakable")


def test_taps_are_fresh_at_every_replay(breakable: dict[str, Any]) -> None:
    """Each graph is captured once, with zeros; a stale tap would bring back those."""
    assert all(host > 64 for host in breakable["host"])
    assert breakable["error"] < TOLERANCE


def test_padded_rows_are_not_taken(breakable: dict[str, Any]) -> None:
    padded = [(rows, bucket) for _, rows, bucket in breakable["batches"] if rows < bucket]
    assert (3, 4) in padded, "no decode batch was padded"
    assert breakable["passes"] == [rows for _, rows, _ in breakable["batches"]]


def test_every_layer_waits_before_its_attention(breakable: dict[str, Any]) -> None:
    assert not asked_too_late(breakable["events"])


@pytest.mark.parametrize("form", ["kv", "recompute:1,hidden:1,kv:2"])
def test_other_plans_wait_as_well(models: None, form: str) -> None:
    seen = run_in_child(served, ("--hc-forms", form), "breakable")
    assert all(host > 64 for host in seen["host"])
    assert not asked_too_late(seen["events"])
    assert seen["error"] < TOLERANCE


def asked_too_late(events: list[tuple[Any, ...]]) -> list[int]:
    """Layers whose attention ran in a prefill without having waited."""
    late, waited = [], False
    decode = False
    for event in events:
        if event[0] == "rows":
            decode, waited = event[1] == 1, False
        elif event[0] == "wait":
            waited = True
        elif not decode:
            if not waited:
                late.append(event[1])
            waited = False
    return late


def test_a_tap_that_keeps_what_it_is_handed_is_seen(models: None) -> None:
    seen = run_in_child(served, ("--hc-forms", "hidden"), "breakable", tap_by_reference)
    assert seen["error"] > 100 * TOLERANCE


def test_a_gate_inside_a_graph_is_seen(models: None, breakable: dict[str, Any]) -> None:
    """Why `full` is refused: attention reads, and what is restored arrives when it is over."""
    seen = run_in_child(served, ("--hc-forms", "hidden"), "full")
    assert asked_too_late(seen["events"])
    assert seen["tokens"] != breakable["tokens"]
