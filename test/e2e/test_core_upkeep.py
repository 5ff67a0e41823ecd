"""The tiers under SGLang's real scheduler: flush, salts, weights, failures, pins, time to live."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from sglang_hc.capture.saving import STRAIGHT_ROWS
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.core import MODELS, Core, Reply, run_in_child
from support.prompts import SMALL, prompt
from support.versions import new_version

FORMS = ("hidden", "kv")
HIDDEN = (pytest.param("hidden", marks=pytest.mark.slow), "hidden:2,kv:2")
TIGHT = ("--hc-forms", "kv", *SMALL, "--hc-host-size-gb", "0.02")
PINNED = prompt(8, 200)


def emptied(form: str) -> dict[str, Any]:
    """Four salts, whose state leaves the device and comes back; then a flush; then new weights."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    core, found = Core("--hc-forms", form, *SMALL), dict[str, Any]()

    def ask_with_each_salt() -> list[Reply]:
        replies = []
        for salt in (None, "", "a", "b"):
            replies.append(core.ask(prompt(2, 200), 8, salt))
            core.push_out()
        return replies

    found["fresh"], found["again"] = ask_with_each_salt(), ask_with_each_salt()
    core.settle()
    found["held"] = core.tree.stats()["host_blocks"]
    assert core.scheduler.flush_cache()
    core.settle()
    found["flushed"] = core.tree.stats() | {"evictable": core.tree.evictable_size()}
    found["after the flush"] = core.ask(prompt(2, 200), 8)
    core.push_out()
    core.settle()
    found["held again"] = core.tree.stats()["host_blocks"]
    request = UpdateWeightFromDiskReqInput(
        model_path=str(MODELS / "llama-mha"), load_format="auto", flush_cache=False
    )
    assert core.scheduler.weight_updater.update_weights_from_disk(request).success
    core.settle()
    found["blocks of the same weights"] = core.tree.stats()["host_blocks"]
    core.evict()
    found["with the same weights"] = core.ask(prompt(2, 200), 8)
    new_version(core)
    core.settle()
    found["with new weights"] = core.ask(prompt(2, 200), 8)
    return found


@pytest.mark.parametrize("form", (*FORMS, "recompute:1,hidden:1,kv:2"))
def test_no_salt_no_flush_and_no_weights_let_state_through(models: None, form: str) -> None:
    found = run_in_child(emptied, form)
    assert [reply.cached for reply in found["fresh"]] == [0] * 4
    assert [reply.host for reply in found["again"]] == [199] * 4
    flushed = found["flushed"]
    assert found["held"] >= 12
    assert flushed["host_blocks"] == 0 and flushed["host_free_slots"] == flushed["host_slots"]
    assert flushed["evictable"] == 0 and found["after the flush"].cached == 0
    assert found["held again"] >= 3
    assert found["blocks of the same weights"] == found["held again"]
    assert found["with the same weights"].host == 199 and found["with new weights"].cached == 0
    replies = (
        *found["fresh"], *found["again"], found["after the flush"], found["with new weights"],
        found["with the same weights"],
    )  # fmt: skip
    assert len({tuple(reply.tokens) for reply in replies}) == 1


def failing(form: str) -> tuple[Any, ...]:
    from sglang_hc.store import executor

    core = Core("--hc-forms", form, *SMALL)
    start = prompt(2, STRAIGHT_ROWS - 1)  # its rows wait in a snapshot, as those of the reply do
    history = [*start, *core.ask(start, 185, "whole").tokens]
    wanted = core.ask(history, 8, "whole").tokens
    core.settle()
    perform, failures = executor.perform, []

    def fail(*_: Any) -> None:
        failures.append(True)
        raise OSError("the memory of the test is gone")

    executor.perform = fail
    first = core.ask(start, 185, "failed")
    core.settle()
    executor.perform = perform
    assert [*start, *first.tokens] == history
    core.push_out()
    second = core.ask(history, 8, "failed")
    core.push_out()
    third = core.ask(history, 8, "failed")
    core.settle()
    return wanted, (second, third), failures, core.tree.stats()


@pytest.mark.parametrize("form", HIDDEN)  # KV needs no such write
def test_a_failed_write_costs_a_recomputation_and_no_token(models: None, form: str) -> None:
    wanted, replies, failures, stats = run_in_child(failing, form)
    assert failures
    assert [reply.tokens for reply in replies] == [wanted] * 2
    assert stats["scatter_failed"] >= 1
    assert [reply.cached for reply in replies] == [0, 199]
    assert stats["host_staged_slots"] == 0


def ask_pinned(core: Core, seconds: float) -> list[int]:
    wish = {"hc_pin": {"session": "tool", "ttl_s": seconds}}
    rid = core.submit(PINNED, 8, custom_params=wish)
    core.run()
    core.settle()
    return core.reply(rid).tokens


def flood_host(core: Core) -> None:
    """More unrelated conversations than the host tier holds."""
    rng = random.Random(1)
    for _ in range(2 * core.tree.tiers.host.num_slots // 4):
        core.ask([rng.randrange(3, 900) for _ in range(250)], 1, salt="flood")
    core.settle()


def a_pin_and_its_end() -> tuple[Any, ...]:
    core = Core(*TIGHT)
    reply = ask_pinned(core, 600.0)
    pins = core.tree.tiers.retention.pinned(None)
    flood_host(core)
    path = Prefix(None, pack_tokens([*PINNED, *reply]))
    held = core.tree.tiers.host.tree.match(path).ready.tokens
    kept = core.ask([*PINNED, *reply, 5], 4)
    core.tree.tiers.retention.pins.expire(time.monotonic() + 601)
    flood_host(core)
    lost = core.ask([*PINNED, *reply, 5], 4)
    return pins, held, kept, lost, core.tree.stats()


def test_a_pinned_session_outlives_a_flood_until_its_pin_ends(models: None) -> None:
    pins, held, kept, lost, stats = run_in_child(a_pin_and_its_end)
    assert [(pin.session, pin.blocks) for pin in pins] == [("tool", 4)]
    assert held >= 207  # the token sampled last need not have been computed
    assert kept.cached >= 207
    assert lost.cached == 0
    assert kept.tokens == lost.tokens
    assert stats["evicted_blocks"] > 0 and "pins_refused" not in stats


def a_time_to_live() -> tuple[Any, ...]:
    core = Core(*TIGHT, "--hc-ttl", "600")
    first = core.ask(PINNED, 8)
    core.settle()
    core.flood(random.Random(2), 1300)
    soon = core.ask([*PINNED, *first.tokens, 5], 1)
    core.flood(random.Random(3), 1300)
    retention = core.tree.tiers.retention
    retention._clock = lambda: time.monotonic() + 601
    core.run()
    retention._clock = time.monotonic
    late = core.ask([*PINNED, *first.tokens, 5], 1)
    return soon, late, core.tree.stats()


def test_what_nobody_used_for_its_time_to_live_is_gone(models: None) -> None:
    soon, late, stats = run_in_child(a_time_to_live)
    assert soon.host > 190
    assert late.cached == 0
    assert stats["expired_blocks"] >= 4


def tight(form: str, gib: str) -> tuple[list[list[int]], dict[str, int]]:
    """Replies of five conversations of three turns that take turns, and what was counted."""
    core = Core("--hc-forms", form, *SMALL, "--hc-host-size-gb", gib)
    tokens, histories = [], [prompt(20 + number, 130) for number in range(5)]
    for _ in range(3):
        for history in histories:
            reply = core.ask(history, 10)
            tokens.append(reply.tokens)
            history += [*reply.tokens, *prompt(len(history), 15)]
        core.settle()
    return tokens, core.tree.stats()


@pytest.mark.parametrize("form", HIDDEN)
def test_a_tier_of_few_blocks_evicts_and_changes_no_token(models: None, form: str) -> None:
    roomy, large = run_in_child(tight, form, "0.2")
    size = 7.5 * large["host_bytes"] / large["host_slots"] / 2**30
    tokens, stats = run_in_child(tight, form, str(size))
    assert tokens == roomy and stats["host_slots"] == 7
    assert stats["evicted_blocks"] > 7 and large["evicted_blocks"] == 0
    assert stats["host_staged_slots"] == 0


def other_stores() -> tuple[list[bool], list[str], bool]:
    """What is answered to who wants to take SGLang's store away, or to add one."""
    from sglang.srt.managers.io_struct import (
        AttachHiCacheStorageReqInput,
        DetachHiCacheStorageReqInput,
    )

    core = Core("--hc-forms", "kv", *SMALL)
    asked = (
        core.scheduler.detach_hicache_storage_wrapped,
        core.scheduler.attach_hicache_storage_wrapped,
    )
    with_store = AttachHiCacheStorageReqInput(hicache_storage_backend="file")
    answers = [asked[0](DetachHiCacheStorageReqInput()), asked[1](with_store)]
    told = core.scheduler.enable_hicache_storage
    return [one.success for one in answers], [one.message for one in answers], told


def test_stores_are_neither_added_nor_taken_away(models: None) -> None:
    """SGLang would tell the tree of no waiting request any more."""
    good, said, told = run_in_child(other_stores)
    assert good == [False, False] and told
    assert "until the server is started again" in said[0]
