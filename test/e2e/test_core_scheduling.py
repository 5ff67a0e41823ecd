"""The tiers under SGLang's real scheduler: chunks, batches, aborts, retraction, schedulers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.conversations import both, check_same_tokens
from support.core import Core, Reply, run_in_child
from support.during import When
from support.exactness import BOUND
from support.meetings import HeldDisk
from support.prompts import SMALL, on_disk, prompt

PLAN = "hidden:2,kv:2"


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--chunked-prefill-size", "64"), marks=pytest.mark.slow),
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
        "lengths": [len(tokens) for tokens in prompts],
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
    stats, found = seen["stats"], [reply.cached + 1 for reply in seen["again"]]
    lost = sum(had < length for had, length in zip(found, seen["lengths"], strict=True))
    assert lost <= stats.get("hole", 0) <= 1, "one began behind what was not kept yet"
    assert "gap" not in stats, "the rows of a pass are told apart"
    assert max(reply.host for reply in seen["again"]) >= 100
    assert stats["host_staged_slots"] == 0


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


class Ends(NamedTuple):
    """Three conversations whose replies end at a token. behind: rows of decode passes that ran
    behind the ends. wanted: the next replies on the device. again: those from host memory. known:
    tokens of each that came before."""

    behind: int
    wanted: list[list[int]]
    again: list[Reply]
    known: list[int]


def ends_at_a_token(form: str, flags: tuple[str, ...]) -> Ends:
    room = ("--max-total-tokens", "2048")
    core = Core("--hc-forms", form, *SMALL, *room, *flags)
    prompts = [prompt(i, 60 + 10 * i) for i in range(3)]
    stops = [core.ask(tokens, 12, "longer").tokens[-1] for tokens in prompts]
    rows, run = [0], core.scheduler.run_batch

    def run_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
        decodes = batch.forward_mode.is_decode()
        rows[0] += len(batch.reqs) if decodes else len(batch.decoding_reqs or ())
        return run(batch, *args, **kwargs)

    core.scheduler.run_batch = run_batch
    rids = [
        core.submit(tokens, 40, stop_token_ids=[stop], ignore_eos=False)
        for tokens, stop in zip(prompts, stops, strict=True)
    ]
    core.run()
    core.settle()
    replies = [core.reply(rid).tokens for rid in rids]
    behind = rows[0] - sum(len(reply) - 1 for reply in replies)
    told = [[*tokens, *reply] for tokens, reply in zip(prompts, replies, strict=True)]
    wanted = [core.ask([*tokens, *prompt(9, 20)], 8).tokens for tokens in told]
    core.settle()
    core.evict()
    asked = [core.submit([*tokens, *prompt(9, 20)], 8) for tokens in told]
    core.run()
    core.settle()
    return Ends(behind, wanted, [core.reply(rid) for rid in asked], [len(one) for one in told])


@pytest.mark.parametrize(
    ("form", "flags"),
    [
        ("hidden", ()),
        ("kv", ("--page-size", "16")),
        ("recompute:1,hidden:1,kv:2", ("--chunked-prefill-size", "64", "--enable-mixed-chunk")),
        ("hidden:2,kv:2", ("--disable-overlap-schedule",)),
    ],
    ids=["hidden", "pages", "mixed chunks", "no overlap"],
)
def test_what_a_pass_behind_the_end_computes_spoils_nothing(
    models: None, form: str, flags: tuple[str, ...]
) -> None:
    """SGLang foresees an end by length, but no other: with overlap scheduling a decode pass of the
    request is under way when the tree takes it."""
    ends = run_in_child(ends_at_a_token, form, flags)
    assert ends.behind == (0 if "--disable-overlap-schedule" in flags else 3)
    assert [reply.tokens for reply in ends.again] == ends.wanted
    assert all(reply.device == 0 for reply in ends.again)
    page = 16 if "--page-size" in flags else 1
    for reply, known in zip(ends.again, ends.known, strict=True):
        assert reply.host >= (known - 1) // page * page


class Room(NamedTuple):
    """The replies of a request and of one of a higher priority that comes while it decodes and
    whose state the disk keeps back for a few passes: each undisturbed, then both. retractions: of
    the first. restored: tokens of it that came back, of which the device had none any more."""

    alone: list[list[int]]
    both: list[list[int]]
    retractions: int
    restored: int


def makes_room(folder: str, chunk: str) -> Room:
    flags = ("--max-running-requests", "1", "--enable-priority-scheduling")
    core = Core(
        "--hc-forms", "kv", *SMALL, *flags, *on_disk(folder), "--chunked-prefill-size", chunk
    )
    alone = [core.ask(tokens, 40).tokens for tokens in (prompt(5, 100), prompt(2, 200))]
    core.forget()
    disk, rids = HeldDisk(core), [core.submit(prompt(5, 100), 40, salt="not stored")]
    core.inbox[-1].priority, disk.left = 0, 0

    def leave() -> None:
        core.tree.tiers.drain()
        core.evict()

    left = When(lambda: any(r.retraction_count for r in core.scheduler.waiting_queue), leave)

    def each_pass(number: int) -> None:
        if disk.left is None:
            left(number)
        if number == 8:
            rids.append(core.submit(prompt(2, 200), 40))
            core.inbox[-1].priority = 100
        if number == 20:
            disk.left = None

    core.run(each_pass=each_pass)
    both = [core.reply(rid) for rid in rids]
    assert both[1].storage >= 192
    core.settle()
    restored = core.tree.stats().get("retracted_restored_tokens", 0)
    retractions = core.requests[rids[0]].retraction_count
    return Room(alone, [reply.tokens for reply in both], retractions, restored)


@pytest.mark.parametrize("chunk", ["64", "512"])
def test_a_request_that_makes_room_for_one_whose_state_is_on_its_way_is_served(
    models: None, tmp_path: Path, chunk: str
) -> None:
    """It was taken out in each pass and came back in the next, for one that could not run yet."""
    room = run_in_child(makes_room, str(tmp_path / "d"), chunk)
    assert room.both == room.alone
    assert room.retractions == 1
    assert room.restored > 100, "the prompt, and what was replied"
