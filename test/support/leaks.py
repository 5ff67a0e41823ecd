"""Nothing is left of anybody when an engine is idle.

SGLang's own checks (`CHECKS`) are on in every engine and server of a test, and end its scheduler
where slots or rows do not add up. They count a locked node as in use, whoever forgot the lock, and
know nothing of the tiers. So each `Core.run` that ends with nothing left to do is looked at once
more (`nothing_runs`), and each `Core.settle` (`nothing_is_saved`).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest

CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
"""SGLang's, by the environment."""


errors_are_planted = False
"""Set in a process whose test plants errors in our own code."""


def nothing_runs(core: Any) -> None:
    """No request has a lock, device slots, a restoration or a place in a queue any more. core: a
    `Core` that is idle."""
    tree = core.tree
    locked = tree.protected_size(), tree.swa_protected_size(), tree.mamba_protected_size()
    assert not any(locked), f"a lock is left on the device tree: {locked}"
    tiers = getattr(tree, "tiers", None)
    if tiers is None:
        return
    assert not tree.prerestored.tokens, "device slots are left of a request that was restored early"
    assert not tree.restorer.num_queued and not tree.restorer.under_way, "a restoration is left"
    # Where an error of ours hides the queue, it is looked at in the first pass that sees it again.
    broken = tiers.own_errors["guarded_errors"] > 0
    assert errors_are_planted or not broken, "an error of ours was guarded, and nobody planted it"
    waits = len(tiers.queue.requests) > 0 or tiers.meetings.under_way
    assert broken or not waits, "somebody waits"
    assert not tiers.capture.staged_slots(), "host slots are left of a request that is over"
    tiers.check_integrity()


def nothing_is_saved(core: Any) -> None:
    """Nor is anything on its way to host memory or from it. core: a `Core` that is idle, and has
    waited for what is under way."""
    tiers = getattr(core.tree, "tiers", None)
    if tiers is None:
        return
    assert not tiers.host.staged_slots, "a staged slot is left"
    if tiers.ends is not None:
        assert not tiers.ends.staged_slots, "a staged slot of an end part is left"
        ends = [node.end for node in tiers.host.tree.nodes() if node.end is not None]
        assert all(one.ready and not one.pins for one in ends), "an end part is left on its way"
    assert tiers.disk is None or not len(tiers.disk.coming), "a block is still on its way"
    pinned = [node for node in tiers.host.tree.nodes() if node.pins]
    # A sample of what was restored stays until it is audited.
    sampled = core.tree.audit is not None and core.tree.audit.waiting
    assert sampled or not pinned, f"{len(pinned)} blocks are left pinned"


def room(core: Any) -> dict[str, int]:
    """What is free in each pool of the device and of the tiers. core: a `Core` that is idle."""
    scheduler, tree = core.scheduler, core.tree
    allocator, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    found = {"rows of requests": rows.available_size()}
    if tree.supports_swa():
        found["slots"] = allocator.full_available_size()
        found["second slots"] = allocator.swa_available_size()
    else:
        found["slots"] = allocator.available_size()
    if tree.supports_mamba():
        found["states"] = rows.mamba_allocator.available_size()
    tiers = tree.tiers
    found["host slots"] = tiers.host.free_slots
    if tiers.ends is not None:
        found["end slots"] = tiers.ends.free_slots
    if tiers.capture.hidden is not None:
        found["snapshot rows"] = tiers.capture.hidden.snapshots.room
    return found


def everything_leaves(core: Any, empty: dict[str, int]) -> None:
    """When every tier above the disk is flushed, each pool is as it was before the first request.
    core: a `Core` that is idle. empty: its `room` at its start."""
    assert core.scheduler.flush_cache()
    core.settle()
    left = room(core)
    assert left == empty, f"not all came back to the pools: {left} of {empty}"


def watch(patch: pytest.MonkeyPatch) -> None:
    """Have every engine looked at that this process or a child of it runs from now on."""
    from benchmark.harness.core import Core

    for name, value in CHECKS.items():
        patch.setenv(name, value)
    run, settle = Core.run, Core.settle

    @wraps(run)
    def watched_run(core: Any, *args: Any, **kwargs: Any) -> None:
        run(core, *args, **kwargs)
        if core.scheduler.is_fully_idle():
            nothing_runs(core)

    @wraps(settle)
    def watched_settle(core: Any) -> None:
        settle(core)
        if core.scheduler.is_fully_idle():
            nothing_is_saved(core)

    patch.setattr(Core, "run", watched_run)
    patch.setattr(Core, "settle", watched_settle)
