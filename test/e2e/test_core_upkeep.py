"""The tiers under SGLang's real scheduler: flush, namespaces, a full tier, weights, failures."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hc.capture.saving import STRAIGHT_ROWS
from support.core import MODELS, Core, Reply, run_in_child
from support.prompts import prompt

POOL = 640
FORMS = ("hidden", "kv")
FLAGS = ("--max-total-tokens", str(POOL), "--dtype", "float32")
ROOMY = (*FLAGS, "--hc-host-size-gb", "0.2")


def emptied(form: str) -> dict[str, Any]:
    """Four salts, whose state leaves the device and comes back; then a flush; then new weights."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    core, found = Core("--hc-forms", form, *ROOMY), dict[str, Any]()

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
    request = UpdateWeightFromDiskReqInput(
        model_path=str(MODELS / "llama-mha"), load_format="auto", flush_cache=False
    )
    assert core.scheduler.weight_updater.update_weights_from_disk(request).success
    core.settle()
    found["blocks of old weights"] = core.tree.stats()["host_blocks"]
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
    assert found["blocks of old weights"] == 0 and found["with new weights"].host == 0
    replies = (
        *found["fresh"], *found["again"], found["after the flush"], found["with new weights"],
    )  # fmt: skip
    assert len({tuple(reply.tokens) for reply in replies}) == 1


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
