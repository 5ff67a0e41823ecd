"""As test_core_guard.py, for the hooks that only speculation, priorities or adapters reach."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hc.srt.engine import guard
from support.adapters import pin_nothing, write_adapter
from support.core import Core, run_in_child
from support.planted import Faults
from support.speculation import NGRAM, SpeculativeCore
from support.speculative_talks import MODEL, ROOMY, TIGHT, Told, converse

RNG = random.Random(3)
LOW, HIGH = RNG.choices(range(3, 900), k=120), RNG.choices(range(3, 900), k=200)
both_sides = pytest.mark.parametrize("late", [False, True], ids=["before", "behind"])


def plainly() -> Told:
    return converse(Core(*ROOMY, model=MODEL), evict=False)


def speculate(late: bool, taught: list[int]) -> dict[str, Any]:
    """Per place: replies while it fails and afterwards, tokens that came back, errors."""
    faults = Faults()
    faults.plant()
    core = SpeculativeCore(*NGRAM, *TIGHT, "--hc-forms", "hidden:2,kv:2", taught=[taught],
                           model=MODEL)  # fmt: skip
    found = {}
    for place in ("speculation.sampled", "speculation.accepted"):
        before = guard.counters["guarded_errors"]
        faults.place, faults.late = place, late
        broken = converse(core, evict=True)
        faults.place = ""
        errors = guard.counters["guarded_errors"] - before
        core.evict()
        core.tree.tiers.clear()
        sound = converse(core, evict=True)
        found[place] = broken.tokens, sound.tokens, sound.cached, errors
    return found


@both_sides
def test_of_speculation(models: None, late: bool) -> None:
    plain = run_in_child(plainly)
    for place, (broken, sound, cached, errors) in run_in_child(
        speculate, late, plain.history
    ).items():
        assert errors > 0, f"{place} was not reached"
        assert broken == plain.tokens, f"{place}: other tokens while it fails"
        assert sound == plain.tokens, f"{place}: other tokens afterwards"
        assert all(host > 64 for _, host, _ in cached[1:]), f"{place}: nothing comes back"


def make_room(late: bool) -> tuple[Any, ...]:
    """Replies alone, while the hook fails, and afterwards; retractions; errors."""
    faults = Faults()
    faults.plant()
    core = Core(
        "--hc-forms", "kv", "--max-total-tokens", "640", "--dtype", "float32",
        "--hc-host-size-gb", "0.05", "--enable-priority-scheduling", "--max-running-requests", "1",
    )  # fmt: skip

    def both() -> tuple[list[list[int]], int]:
        rids, passes = [core.submit(LOW, 24)], 0
        core.inbox[-1].priority = 0

        def receive() -> list[Any]:
            nonlocal passes
            passes += 1
            if passes == 8:
                rids.append(core.submit(HIGH, 24))
                core.inbox[-1].priority = 100
            return core.receive()

        core.scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
        core.run()
        core.settle()
        requests = [core.requests[rid] for rid in rids]
        return [core.reply(rid).tokens for rid in rids], sum(r.retraction_count for r in requests)

    alone = [core.ask(tokens, 24).tokens for tokens in (LOW, HIGH)]
    core.evict()
    faults.place, faults.late = "preemption.preempt_to_schedule", late
    broken, retractions = both()
    faults.place, errors = "", guard.counters["guarded_errors"]
    core.evict()
    return alone, broken, retractions, both()[0], errors


@both_sides
def test_of_priorities(models: None, late: bool) -> None:
    alone, broken, retractions, sound, errors = run_in_child(make_room, late)
    assert errors > 0 and retractions > 0
    assert broken == sound == alone


def ask_with_adapters(late: bool, *adapters: str) -> tuple[Any, ...]:
    """Replies with each adapter before, while the hook fails and afterwards; errors; tokens that
    came back."""
    faults = Faults()
    faults.plant()
    pin_nothing()
    paths = [f"{Path(adapter).name}={adapter}" for adapter in adapters]
    core = Core(
        "--lora-paths", *paths, "--lora-backend", "torch_native", "--max-loras-per-batch", "1",
        "--max-total-tokens", "1280", "--hc-host-size-gb", "0.05", "--dtype", "float32",
        "--hc-forms", "kv", model="llama-gqa",
    )  # fmt: skip
    loras = list(core.scheduler.tp_worker.model_runner.lora_manager.lora_refs)

    def ask() -> tuple[list[list[int]], list[int]]:
        core.settle()
        core.evict()
        rids = [core.submit(HIGH, 16, lora=lora) for lora in loras]
        core.run()
        replies = [core.reply(rid) for rid in rids]
        return [reply.tokens for reply in replies], [reply.cached for reply in replies]

    first, _ = ask()
    faults.place, faults.late = "hooks.adapter_fits", late
    broken, _ = ask()
    faults.place, errors = "", guard.counters["guarded_errors"]
    sound, cached = ask()
    return first, broken, sound, cached, errors


@both_sides
def test_of_adapters(models: None, tmp_path: Path, late: bool) -> None:
    adapters = [write_adapter(tmp_path / name, seed, "llama-gqa") for seed, name in enumerate("ab")]
    first, broken, sound, cached, errors = run_in_child(ask_with_adapters, late, *adapters)
    assert errors > 0 and first[0] != first[1]
    assert first == broken == sound and min(cached) >= 128
