"""The tiers under SGLang's real scheduler: chunks, batches, aborts, retraction, schedulers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.conversations import both, check_same_tokens
from support.core import Core, run_in_child
from support.during import When
from support.exactness import BOUND
from support.meetings import HeldDisk
from support.prompts import SMALL, on_disk, prompt

PLAN = "hidden:2,kv:2"


@pytest.mark.parametrize(
    "flags",
    [
        ("--chunked-prefill-size", "64"),
        ("--chunked-prefill-size", "50"),
        ("--chunked-prefill-size", "64", "--enable-mixed-chunk"),
        ("--disable-overlap-schedule",),
        ("--schedule-policy", "lpm"),
    ],
    ids=" ".join,
)
def test_evicted_history_comes_back(models: None, flags: tuple[str, ...]) -> None:
    found = run_in_child(both, "llama-mha", PLAN, "float32", None, False, *flags)
    check_same_tokens(found)
    assert found.worst("error") <= BOUND["float32"]
    assert found.stats["host_staged_slots"] == 0


def several_at_once(form: str, flags: tuple[str, ...]) -> dict[str, Any]:
    """Four requests with 100 common tokens at once, alone afterwards, and after an eviction."""
    core = Core("--hc-forms", form, *SMALL, *flags)
    prompts = [[*prompt(5, 100), *prompt(50 + i, 20 + 7 * i)] for i in range(4)]

    def together() -> list:
        rids = [core.submit(tokens, 12) for tokens in prompts]
        core.run()
        core.settle()
        return [core.reply(rid) for rid in rids]

    first = together()
    core.push_out()
    return {
        "first": first,
        "again": together(),
        "alone": [core.ask(tokens, 12, f"alone {i}") for i, tokens in enumerate(prompts)],
        "stats": core.tree.stats(),
    }


@pytest.mark.parametrize("form", [PLAN, "recompute:1,hidden:1,kv:2"])
@pytest.mark.parametrize(
    "flags",
    [(), ("--chunked-prefill-size", "64", "--enable-mixed-chunk")],
    ids=["whole", "mixed chunks"],
)
def test_concurrent_requests_share_a_prefix(
    models: None, form: str, flags: tuple[str, ...]
) -> None:
    seen = run_in_child(several_at_once, form, flags)
    wanted = [reply.tokens for reply in seen["alone"]]
    assert [reply.tokens for reply in seen["first"]] == wanted
    assert [reply.tokens for reply in seen["again"]] == wanted
    assert all(reply.cached >= 64 for reply in seen["again"])
    assert max(reply.host for reply in seen["again"]) >= 100
    assert seen["stats"]["host_staged_slots"] == 0


def aborted() -> dict[str, dict[str, Any]]:
    """By where the request is that is aborted: it waits, is half prefilled, or decodes."""
    core = Core(
        "--hc-forms", PLAN, *SMALL, "--chunked-prefill-size", "64", "--max-running-requests", "1"
    )
    requests, scheduler, found = core.requests, core.scheduler, {}
    for where in ("waiting", "chunked", "running"):
        known = core.ask(prompt(8, 200), 8)
        core.push_out()
        first = core.submit([*prompt(8, 200), *prompt(9, 150)], 60)
        second = core.submit(prompt(10, 100), 40)
        conditions: dict[str, Callable[[], bool]] = {
            "waiting": lambda rid=second: rid in requests and bool(scheduler.waiting_queue),
            "chunked": lambda: scheduler.chunked_req is not None,
            "running": lambda rid=first: rid in requests and len(requests[rid].output_ids) > 5,
        }
        victim, survivor = (second, first) if where == "waiting" else (first, second)
        aborts = When(conditions[where], partial(core.abort, victim))
        core.run(each_pass=aborts)
        core.settle()
        after = core.ask([*prompt(8, 200), *known.tokens], 8)
        core.settle()
        found[where] = {
            "called": aborts.called,
            "generated": len(requests[victim].output_ids),
            "survivor": len(core.reply(survivor).tokens),
            "cached": after.cached,
            "staged": core.tree.stats()["host_staged_slots"],
        }
        core.forget()
    return found


def test_an_abort_leaks_nothing(models: None) -> None:
    for where, seen in run_in_child(aborted).items():
        assert seen["called"], where
        assert seen["generated"] < 60
        assert seen["survivor"] == (60 if where == "waiting" else 40)
        assert seen["cached"] >= 200
        assert seen["staged"] == 0


def first_is_aborted() -> int:
    core = Core("--hc-forms", "kv", *SMALL, "--chunked-prefill-size", "64")
    victim = core.submit(prompt(8, 150), 20)
    core.run(each_pass=When(lambda: victim in core.requests, partial(core.abort, victim)))
    core.settle()
    return len(core.ask(prompt(9, 100), 8).tokens)


def test_a_server_whose_first_request_is_aborted_serves_the_next(models: None) -> None:
    """Between two chunks, before every hook was called: no proof of a release that calls fewer."""
    assert run_in_child(first_is_aborted) == 8


def retracting_cut_prompts() -> tuple[list[Any], dict[str, int]]:
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 4
    overflow = ("--hc-overflow", "recompute", "--hc-overflow-reserve", "64")
    room = ("--context-length", "512", "--max-total-tokens", "2048")  # later flags count
    core = Core("--hc-forms", "kv", *SMALL, *room, *overflow)
    rids = [core.submit(prompt(i, 600), 24) for i in range(3)]
    core.run()
    done = [core.requests[rid] for rid in rids]
    found = [(r.retraction_count, len(r.origin_input_ids), r.cached_tokens) for r in done]
    return found, core.tree.tiers.counts()


def test_a_cut_prompt_that_is_retracted_counts_once(models: None) -> None:
    """It was counted again each time that it was queued again, and as answered before it was."""
    found, counts = run_in_child(retracting_cut_prompts)
    assert sum(retractions for retractions, _, _ in found) > 0
    assert counts["overflow_requests"] == 3
    assert counts["overflow_dropped_tokens"] == sum(600 - length for _, length, _ in found)
    assert counts["overflow_recomputed_tokens"] == sum(new - old for _, new, old in found)


def makes_room(folder: str, chunk: str) -> tuple[list, list]:
    """The replies of a request and of one of a higher priority that comes while it decodes and
    whose state the disk keeps back for a few passes: each undisturbed, then both."""
    flags = ("--max-running-requests", "1", "--enable-priority-scheduling")
    core = Core(
        "--hc-forms", "kv", *SMALL, *flags, *on_disk(folder), "--chunked-prefill-size", chunk
    )
    alone = [core.ask(tokens, 40).tokens for tokens in (prompt(5, 100), prompt(2, 200))]
    core.forget()
    disk, rids = HeldDisk(core), [core.submit(prompt(5, 100), 40, salt="not stored")]
    core.inbox[-1].priority, disk.left = 0, 0

    def each_pass(number: int) -> None:
        if number == 8:
            rids.append(core.submit(prompt(2, 200), 40))
            core.inbox[-1].priority = 100
        if number == 20:
            disk.left = None

    core.run(each_pass=each_pass)
    both = [core.reply(rid) for rid in rids]
    assert both[1].storage >= 192
    core.settle()
    return alone, [reply.tokens for reply in both]


@pytest.mark.parametrize("chunk", ["64", "512"])
def test_a_request_that_makes_room_for_one_whose_state_is_on_its_way_is_served(
    models: None, tmp_path: Path, chunk: str
) -> None:
    """SGLang takes it back only with the other one's batch, which did not come: it was lost."""
    alone, both = run_in_child(makes_room, str(tmp_path / "d"), chunk)
    assert both == alone
