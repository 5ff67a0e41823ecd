"""The tiers under SGLang's real scheduler: flush, namespaces, a full tier, weights, failures."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hc.capture.saving import STRAIGHT_ROWS
from support.core import MODELS, Core, run_in_child
from support.prompts import prompt

POOL = 640
FORMS = ("hidden", "kv")
FLAGS = ("--max-total-tokens", str(POOL), "--dtype", "float32")
ROOMY = (*FLAGS, "--hc-host-size-gb", "0.2")


def flushed(form: str) -> tuple[Any, ...]:
    core = Core("--hc-forms", form, *ROOMY)
    before = core.ask(prompt(2, 200), 8)
    core.settle()
    held = core.tree.stats()["host_blocks"]
    assert core.scheduler.flush_cache()
    core.settle()
    stats = core.tree.stats()
    return before, held, stats, core.tree.evictable_size(), core.ask(prompt(2, 200), 8)


@pytest.mark.parametrize("form", FORMS)
def test_a_flush_empties_both_tiers(models: None, form: str) -> None:
    before, held, stats, evictable, after = run_in_child(flushed, form)
    assert held >= 3
    assert stats["host_blocks"] == 0 and stats["host_free_slots"] == stats["host_slots"]
    assert evictable == 0
    assert after.cached == 0 and after.tokens == before.tokens


def salted(form: str) -> list:
    core = Core("--hc-forms", form, *ROOMY)
    salts = [None, "", "a", "b"]
    seen = []
    for salt in salts:
        fresh = core.ask(prompt(2, 200), 8, salt)
        core.push_out()
        seen.append((fresh.cached, fresh.tokens))
    for salt in salts:
        again = core.ask(prompt(2, 200), 8, salt)
        seen.append((again.host, again.tokens))
        core.push_out()
    return seen


@pytest.mark.parametrize("form", FORMS)
def test_no_salt_sees_the_state_of_another(models: None, form: str) -> None:
    seen = run_in_child(salted, form)
    assert [cached for cached, _ in seen] == [0] * 4 + [199] * 4
    assert len({tuple(tokens) for _, tokens in seen}) == 1


def tight(form: str, gib: str) -> tuple[list, dict]:
    core = Core("--hc-forms", form, *FLAGS, "--hc-host-size-gb", gib)
    tokens = []
    histories = [prompt(20 + i, 130) for i in range(5)]
    for _ in range(3):
        for history in histories:
            reply = core.ask(history, 10)
            tokens.append(reply.tokens)
            history += [*reply.tokens, *prompt(len(history), 15)]
        core.settle()
    return tokens, core.tree.stats()


@pytest.mark.parametrize("form", FORMS)
def test_a_tier_of_few_blocks_evicts_and_changes_no_token(models: None, form: str) -> None:
    roomy, large = run_in_child(tight, form, "0.2")
    size = 7.5 * large["host_bytes"] / large["host_slots"] / 2**30
    tokens, stats = run_in_child(tight, form, str(size))
    assert tokens == roomy
    assert stats["host_slots"] == 7
    assert stats["evicted_blocks"] > 7 and large["evicted_blocks"] == 0
    assert stats["host_staged_slots"] == 0


def updated(form: str, model: str) -> tuple[Any, ...]:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    core = Core("--hc-forms", form, *ROOMY)
    before = core.ask(prompt(2, 200), 8)
    core.push_out()
    request = UpdateWeightFromDiskReqInput(
        model_path=str(MODELS / model), load_format="auto", flush_cache=False
    )
    output = core.scheduler.weight_updater.update_weights_from_disk(request)
    core.settle()
    blocks = core.tree.stats()["host_blocks"]
    return before, output.success, blocks, core.ask(prompt(2, 200), 8)


@pytest.mark.parametrize("form", (*FORMS, "recompute:1,hidden:1,kv:2"))
def test_new_weights_forget_what_was_saved(models: None, form: str) -> None:
    before, success, blocks, after = run_in_child(updated, form, "llama-mha")
    assert success and blocks == 0
    assert after.host == 0 and after.tokens == before.tokens


def failing(form: str) -> tuple[Any, ...]:
    from sglang_hc.store import executor

    core = Core("--hc-forms", form, *ROOMY)
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


@pytest.mark.parametrize("form", ("hidden", "hidden:2,kv:2"))  # KV needs no such write
def test_a_failed_write_costs_a_recomputation_and_no_token(models: None, form: str) -> None:
    wanted, replies, failures, stats = run_in_child(failing, form)
    assert failures
    assert [reply.tokens for reply in replies] == [wanted] * 2
    assert stats["scatter_failed"] >= 1
    assert [reply.cached for reply in replies] == [0, 199]
    assert stats["host_staged_slots"] == 0
