"""An error of ours in any place that SGLang calls, through SGLang's real scheduler: the request is
answered with the right tokens, so is the next one, and nothing leaks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.srt import plugin
from sglang_hc.srt.engine import guard
from sglang_hc.srt.tree.capturing_tree import CapturingTree
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from support.core import Core, run_in_child
from support.planted import Faults, guarded_methods
from support.prompts import SMALL, prompt
from support.speculation import NGRAM, SpeculativeCore
from support.speculative_talks import MODEL, TIGHT, Told, converse

FLAGS = (
    *("--hc-forms", "hidden:2,kv:2", *SMALL, "--hc-host-size-gb", "0.05"),
    *("--chunked-prefill-size", "128"),
    *("--kv-events-config", '{"publisher": "zmq", "endpoint": "inproc://events"}'),
)
OWN = {"load_back", "insert_restoring_node", "load_met", "refuse", "commit", "drop",
       "forget", "give_up", "stats", "stopped", "ongoing_load_back", "version",
       "weights_change", "weights_settled"}  # fmt: skip
"""Public names of the tree that only our own code calls, whose callers are guarded."""

GUARDED = {
    guard.name_of(hook.call)
    for hook in plugin.all_hooks()
    if isinstance(hook.on_error, guard.Guarded)
}
ELSEWHERE = {
    "hooks.preempt_to_schedule",
    "speculation.sampled",
    "speculation.accepted",
}
"""Not reached without priorities or a draft model, which have tests of their own."""

PLACES = sorted({*guarded_methods(), *GUARDED} - ELSEWHERE)


def use_everything(core: Core, prompt: list[int]) -> list[list[int]]:
    """Every place once: restored, chunked, aborted, asked for numbers. The replies of `prompt`."""
    from sglang.srt.managers.io_struct import ClearHiCacheReqInput, GetInternalStateReq

    core.evict()
    first = core.submit(prompt, 6)
    gone = core.submit(prompt[:50], 6)
    core.abort(gone)
    core.run()
    core.scheduler.get_internal_state(GetInternalStateReq())
    core.scheduler.clear_hicache_storage_wrapped(ClearHiCacheReqInput())
    rng = random.Random(core.passes)
    long = core.ask([rng.randrange(3, 900) for _ in range(500)], 2, salt="long")  # makes room
    assert len(long.tokens) == 2
    return [core.reply(first).tokens, core.ask(prompt, 6).tokens]


def broken_in_turn(late: bool, folder: str) -> list[str]:
    """What is wrong, one line for each place."""
    faults = Faults()
    faults.plant()
    core = Core(*FLAGS, "--hc-disk", f"{folder}:0.1")
    prompt = random.Random(3).choices(range(3, 900), k=300)
    wanted = core.ask(prompt, 6).tokens
    wrong = []
    for place in PLACES:
        before = guard.counters["guarded_errors"]
        faults.place, faults.late = place, late
        replies = use_everything(core, prompt)
        faults.place = ""
        if guard.counters["guarded_errors"] == before:
            wrong.append(f"{place}: not reached")
        if replies != [wanted, wanted]:
            wrong.append(f"{place}: other tokens while it fails")
        if use_everything(core, prompt) != [wanted, wanted]:
            wrong.append(f"{place}: other tokens afterwards")
        if core.ask(prompt, 6).cached < 256:
            wrong.append(f"{place}: nothing is reused afterwards")
        core.settle()
        tiers = core.tree.tiers
        if tiers.capture.staged_slots() or tiers.host.staged_slots:
            wrong.append(f"{place}: slots are left")
        if any(node.pins for node in tiers.host.tree.nodes()):
            wrong.append(f"{place}: a pin is left")
    assert core.tree.stats()["guarded_errors"] == guard.counters["guarded_errors"]
    return wrong


@pytest.mark.parametrize(
    "late",
    [pytest.param(False, id="before"), pytest.param(True, id="behind", marks=pytest.mark.slow)],
)
def test_an_error_of_ours_costs_no_answer(models: None, tmp_path: Path, late: bool) -> None:
    assert run_in_child(broken_in_turn, late, str(tmp_path)) == []


def test_every_method_that_sglang_calls_is_guarded_or_says_why_not() -> None:
    of_tree = {*guarded_methods(), *guard.UNGUARDED}
    public = {
        name for name in [*vars(HcRadixCache), *vars(CapturingTree)] if not name.startswith("_")
    }  # those of `__dict__`: what SGLang's own tree has is SGLang's
    assert public - OWN - {"check_hicache_events"} <= of_tree
    assert of_tree <= public


# -- hooks that only speculation or priorities reach ---------------------------------------------

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
    one = ("--enable-priority-scheduling", "--max-running-requests", "1")
    core = Core("--hc-forms", "kv", *SMALL, *one)

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
    faults.place, faults.late = "hooks.preempt_to_schedule", late
    broken, retractions = both()
    faults.place, errors = "", guard.counters["guarded_errors"]
    core.evict()
    return alone, broken, retractions, both()[0], errors


@both_sides
def test_of_priorities(models: None, late: bool) -> None:
    alone, broken, retractions, sound, errors = run_in_child(make_room, late)
    assert errors > 0 and retractions > 0
    assert broken == sound == alone
