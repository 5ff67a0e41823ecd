"""As test_core_guard.py, for the hooks that only speculation, priorities or adapters reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_hc.srt.engine import guard
from support.adapters import adapter_flags, adapter_ids, write_adapter
from support.core import Core, run_in_child
from support.planted import Faults
from support.prompts import prompt
from support.speculation import NGRAM, SpeculativeCore
from support.speculative_talks import MODEL, TIGHT, Told, converse

LOW, HIGH = prompt("low", 120), prompt("high", 200)
both_sides = pytest.mark.parametrize("late", [False, True], ids=["before", "behind"])


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
def test_of_speculation(plain: Told, late: bool) -> None:
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
        rids = [core.submit(LOW, 24)]
        core.inbox[-1].priority = 0

        def each_pass(number: int) -> None:
            if number == 8:
                rids.append(core.submit(HIGH, 24))
                core.inbox[-1].priority = 100

        core.run(each_pass=each_pass)
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


def ask_with_adapters(late: bool, adapters: dict[str, str]) -> tuple[Any, ...]:
    """Replies with each adapter before, while the hook fails and afterwards; errors; tokens that
    came back."""
    faults = Faults()
    faults.plant()
    core = Core(
        *adapter_flags(adapters, 1), "--max-total-tokens", "1280", "--hc-host-size-gb", "0.05",
        "--dtype", "float32", "--hc-forms", "kv", model=MODEL,
    )  # fmt: skip
    loras = list(adapter_ids(core).values())

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
    adapters = {name: write_adapter(tmp_path / name, i, MODEL) for i, name in enumerate("ab")}
    first, broken, sound, cached, errors = run_in_child(ask_with_adapters, late, adapters)
    assert errors > 0 and first[0] != first[1]
    assert first == broken == sound and min(cached) >= 128
