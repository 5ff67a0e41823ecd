"""Requests with one rid that are alive at once stay two: in their replies, and in K and V.

A client that went away may send again under the same name while its first request still runs, and
two tokenizer workers know nothing of each other's names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.core import Core, Once, Reply, run_in_child
from support.during import When
from support.meetings import HeldDisk, counted, second_turn, start
from support.prompts import on_disk, prompt

POOL = 1200
FLAGS = (
    "--hc-host-size-gb", "0.2", "--max-total-tokens", str(POOL), "--dtype", "float32",
    "--chunked-prefill-size", "128",
)  # fmt: skip
FORMS = ("hidden", "kv", "hidden:2,kv:2")
RID = "conversation 7"
FIRST, SECOND = prompt(0, 150), prompt(1, 190)


def second_turns(core: Core, first: list[Reply]) -> list[tuple[Reply, list[np.ndarray]]]:
    """Replies to the next turns, and the K and V of their prompts."""
    found = []
    for said, reply in zip((FIRST, SECOND), first, strict=False):
        tokens = [*said, *reply.tokens, 5]
        found.append((core.ask(tokens, 12), [part.numpy() for part in core.kv(tokens)]))
    return found


def same(found: list[tuple[Reply, list[np.ndarray]]], wanted: Any) -> None:
    """Both next turns came from the tiers and are those of an engine that never evicts."""
    for (reply, kv), (good, good_kv) in zip(found, wanted, strict=True):
        assert reply.tokens == good.tokens
        for one, other in zip(kv, good_kv, strict=True):
            assert np.allclose(one, other, atol=1e-4), "K or V of other tokens"


def generated(core: Core) -> int:
    """Tokens of the first request's reply so far."""
    return len(core.arrived[0].output_ids) if core.arrived else 0


def one_behind_the_other(core: Core, rid: str | None, **options: Any) -> None:
    """Two prompts, the second of which comes while the first decodes."""
    core.submit(FIRST, 24, rid=rid, **options)
    core.run(
        each_pass=When(
            lambda: generated(core) == 6, lambda: core.submit(SECOND, 24, rid=rid, **options)
        )
    )


def talk(form: str, rid: str | None, evict: bool, *flags: str) -> Any:
    """Both prompts, then their next turns."""
    core = Core("--hc-forms", form, *FLAGS, *flags)
    one_behind_the_other(core, rid)
    return go_on(core, evict)


def go_on(core: Core, evict: bool) -> Any:
    """Replies so far, the next turns, and what was counted."""
    first = [core.reply_to(req) for req in core.arrived]
    core.settle()
    if evict:
        core.evict()
    turns = second_turns(core, first)
    core.settle()
    return [reply.tokens for reply in first], turns, core.tree.stats()


@pytest.fixture
def good(once: Once) -> Any:
    return once(talk, "kv", None, False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flags", [(), ("--disable-overlap-schedule",)], ids=["overlap", "plain"])
def test_two_requests_of_one_rid_are_captured_apart(
    good: Any, form: str, flags: tuple[str, ...]
) -> None:
    tokens, turns, stats = run_in_child(talk, form, RID, True, *flags)
    assert tokens == good[0]
    same(turns, good[1])
    assert all(reply.host >= 170 for reply, _ in turns), "both were saved whole"
    assert stats["host_staged_slots"] == 0


def sent_again(form: str, rid: str | None, evict: bool, *flags: str) -> Any:
    """A client goes away while its request decodes, and sends another prompt at once; the
    scheduler still runs the first one for a pass. Then both prompts have their next turns."""
    core = Core("--hc-forms", form, *FLAGS, *flags)
    core.submit(FIRST, 40, rid=rid)

    def go_away_and_send() -> None:
        core.abort(core.arrived[0].rid)
        core.submit(SECOND, 24, rid=rid)

    core.run(each_pass=When(lambda: generated(core) == 12, go_away_and_send))
    return go_on(core, evict)


@pytest.mark.parametrize("form", FORMS)
def test_a_client_that_goes_away_and_sends_again_gets_its_own_state(
    models: None, form: str
) -> None:
    good_tokens, good_turns, _ = run_in_child(sent_again, form, None, False)
    tokens, turns, stats = run_in_child(sent_again, form, RID, True)
    assert len(tokens[0]) < 40 and len(tokens[1]) == 24
    assert tokens == good_tokens
    same(turns, good_turns)
    assert turns[0][0].host >= 128 and turns[1][0].host >= 190
    assert stats["host_staged_slots"] == 0


def traced(path: str, rid: str) -> None:
    core = Core("--hc-forms", "kv", *FLAGS, "--hc-trace", path)
    one_behind_the_other(core, rid)
    core.tree.release_host_resources()


def test_a_trace_has_two_requests_and_no_name(models: None, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    run_in_child(traced, str(path), RID)
    text = path.read_text()
    assert RID not in text
    events = [json.loads(line) for line in text.splitlines()[1:]]
    for op in ("arrive", "admit", "finish"):
        assert len({event["req"] for event in events if event["op"] == op}) == 2, op


def waiting_for_disk(folder: str, rids: tuple[str | None, str | None], leave: bool) -> Any:
    """The state of two prompts comes from disk, both wait for it, and, if `leave`, the first is
    aborted before the second comes. Returns the replies of those that stayed."""
    core = Core("--hc-forms", "hidden:2,kv:2", *FLAGS, *on_disk(folder))
    for tokens in (FIRST, SECOND):
        core.ask(tokens, 4)
    core.forget()
    disk = HeldDisk(core)
    disk.left = 0
    core.submit(FIRST, 24, rid=rids[0])

    def each_pass(number: int) -> None:
        if number == 6:
            assert len(core.scheduler.waiting_queue) == 1, "its state is on its way"
            if leave:
                core.abort(core.arrived[-1].rid)
            core.submit(SECOND, 24, rid=rids[1])
        if number == 11:
            assert len(core.scheduler.waiting_queue) == 2 - leave
            assert len(core.tree.waiting._view.requests) == 2 - leave, "one record each"
            disk.left = None

    core.run(each_pass=each_pass)
    replies = [core.reply_to(req) for req in core.arrived[-2:] if req.finished()]
    core.settle()
    assert not core.tree.tiers.disk.coming and not core.tree.waiting._view.requests
    return replies, core.tree.stats()


@pytest.mark.parametrize("leave", [False, True], ids=["both stay", "one leaves"])
def test_two_that_wait_for_the_disk_are_waited_for_apart(
    models: None, tmp_path: Path, leave: bool
) -> None:
    good, _ = run_in_child(waiting_for_disk, str(tmp_path / "good"), ("a", "b"), leave)
    found, stats = run_in_child(waiting_for_disk, str(tmp_path / "d"), (RID, RID), leave)
    assert [reply.tokens for reply in found] == [reply.tokens for reply in good]
    wanted = [128, 128] if not leave else [128]  # whole blocks of the prompts
    assert [reply.storage for reply in found] == [reply.storage for reply in good] == wanted
    assert stats["host_staged_slots"] == 0


def in_a_meeting(folder: str, profile: str, form: str, rid: str | None, leave: bool) -> Any:
    """A request meets its history, and another prompt of its name comes meanwhile. If `leave`, the
    first has been aborted just before."""
    core, first = start(form, folder, profile, "--max-running-requests", "8")
    disk = HeldDisk(core)
    disk.left = 2
    core.submit(second_turn(first), 24, rid=rid)
    seen = []

    def each_pass(number: int) -> None:
        if number == 3:
            seen.append(core.tree.tiers.queue.meetings.under_way)
            if leave:
                core.abort(core.arrived[-1].rid)
            core.submit(FIRST, 24, rid=rid)
        if number == 6:
            disk.left = None

    _, counts = counted(core, lambda: core.run(each_pass=each_pass))
    mine = core.arrived[1:]
    assert all(req.finished() for req in mine)
    core.settle()
    core.evict()
    next_turn = core.ask([*FIRST, *core.reply_to(mine[1]).tokens, 5], 12)
    return [core.reply_to(req).tokens for req in mine], next_turn.tokens, seen, counts


@pytest.mark.parametrize("form", ["hidden", "kv"])
@pytest.mark.parametrize("leave", [False, True], ids=["both stay", "one leaves"])
def test_only_the_request_itself_meets_its_history(
    wanted: dict, profile: str, tmp_path: Path, form: str, leave: bool
) -> None:
    good = run_in_child(in_a_meeting, str(tmp_path / "good"), profile, form, None, leave)
    found = run_in_child(in_a_meeting, str(tmp_path / "d"), profile, form, RID, leave)
    assert found[2] == good[2] == [True], "it met its history when the other came"
    assert found[0][1] == good[0][1] and found[1] == good[1]
    if not leave:
        assert found[0][0] == wanted[form][1]
        assert found[3]["meetings"] == 1


def makes_room(rid: str | None) -> Any:
    """A running request is preempted by one of its name. Replies, and how often."""
    core = Core(
        "--hc-forms", "hidden", *FLAGS, "--enable-priority-scheduling",
        "--max-running-requests", "1",
    )  # fmt: skip
    core.submit(FIRST, 24, rid=rid)
    core.inbox[-1].priority = 0

    def send() -> None:
        core.submit(SECOND, 24, rid=rid)
        core.inbox[-1].priority = 100

    core.run(each_pass=When(lambda: generated(core) == 8, send))
    tokens, turns, _ = go_on(core, True)
    return tokens, turns, [req.retraction_count for req in core.arrived[:2]]


def test_one_may_make_room_for_another_of_its_name(good: Any) -> None:
    tokens, turns, retractions = run_in_child(makes_room, RID)
    assert retractions == [1, 0]
    assert tokens == good[0]
    same(turns, good[1])


def pinned(rid: str) -> list[tuple[str, int]]:
    core = Core("--hc-forms", "kv", *FLAGS)
    one_behind_the_other(core, rid, custom_params={"hc_pin": {"ttl_s": 300}})
    core.settle()
    return [(pin.session, pin.blocks) for pin in core.tree.tiers.retention.pinned(None)]


def test_both_keep_the_pins_that_they_asked_for(models: None) -> None:
    pins = run_in_child(pinned, RID)
    assert len(pins) == 2
    assert dict(pins)[RID] == 4, "the last to end has the name"
    assert all(session.startswith(RID) for session, _ in pins)
