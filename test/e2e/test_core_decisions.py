"""Whatever is decided about stored state, the tokens are those of a server that never evicted."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.tree.namespaces import client_namespace
from support.conversations import POOL, converse, options
from support.core import Core, Reply, run_in_child
from support.profiles import cost_model, write
from support.prompts import on_disk, prompt

SLOW_LINK = cost_model(host=1.0, project=1e-9, prefill=1e-9)
EVEN = cost_model(host=2e-4, project=1e-9, prefill=1e-4, hidden_share=1.0)
"""Recomputing a layer takes half as long as loading it: some of each is the fastest."""


def engine(form: str, profile: str, *flags: str) -> Core:
    core = Core(*options(form, "float32"), *flags, profile=profile)
    core.believe_profile()
    return core


def both(form: str, profile: str, prepare: Any = None) -> tuple[dict, dict, dict]:
    """A conversation that stays on the device, one that leaves it, and what was counted."""
    core = engine(form, profile)
    kept = converse(core, "kept", evict=False)
    if prepare is not None:
        prepare(core)
    return kept, converse(core, "evicted", evict=True), core.tree.stats()


def choices(stats: dict) -> dict[str, int]:
    """Choices and reasons of the evicted conversation's two later turns, floods left out."""
    return {
        name.removeprefix("restore_"): count
        for name, count in stats.items()
        if name.startswith(("restore_decision", "restore_reason"))
    }


def check(kept: dict[str, list], evicted: dict[str, list]) -> None:
    assert evicted["tokens"] == kept["tokens"]
    assert evicted["device"] == [0, 0, 0] and kept["device"][1] > 90


def test_refused_restorations_recompute(models: None, tmp_path: Path) -> None:
    kept, evicted, stats = run_in_child(both, "hidden:2,kv:2", write(SLOW_LINK, tmp_path))
    check(kept, evicted)
    assert evicted["host"] == [0, 0, 0]
    assert choices(stats) == {"decision_refuse": 2, "reason_fast_compute": 2}
    assert "restorations" not in stats


@pytest.mark.parametrize("form", ["kv", "hidden"])
def test_stored_layers_are_recomputed_when_that_is_faster(
    models: None, tmp_path: Path, form: str
) -> None:
    kept, evicted, stats = run_in_child(both, form, write(EVEN, tmp_path))
    check(kept, evicted)
    assert min(evicted["host"][1:]) > 90
    assert choices(stats)["decision_recompute_more"] == 2
    assert 0 < stats["recomputed_layer_tokens"] < 4 * stats["restored_tokens"]


def a_block_of_each(core: Core) -> None:
    """Only the first 64 tokens of a hit are restored, as a try may have it."""
    chooser = core.tree.tiers.restorer.planner
    choose = chooser.choose
    chooser.choose = lambda tokens, context, new: choose(64, context, new + tokens - 64)


def test_a_part_of_a_hit_is_restored_and_the_rest_recomputed(models: None, tmp_path: Path) -> None:
    fast_link = write(cost_model(host=1e-9, project=1e-9, prefill=1e-3), tmp_path)
    kept, evicted, stats = run_in_child(both, "hidden:2,kv:2", fast_link, a_block_of_each)
    check(kept, evicted)
    assert evicted["host"] == [0, 64, 64]
    assert choices(stats) == {"decision_load": 2, "reason_as_stored": 2}
    assert stats["restored_tokens"] == 128


def after_restart(directory: str, profile: str, history: list[int]) -> tuple[Reply, dict]:
    core = engine("kv", profile, *on_disk(directory))
    reply = core.ask(history, 16)
    core.settle()
    return reply, core.tree.stats()


@pytest.mark.parametrize(("disk", "read"), [(1e-6, True), (1.0, False)])
def test_a_disk_slower_than_recomputing_is_not_waited_for(
    models: None, tmp_path: Path, disk: float, read: bool
) -> None:
    history, profile = prompt(6, 260), write(cost_model(disk=disk, prefill=1e-2), tmp_path)
    wanted, _ = run_in_child(after_restart, str(tmp_path / "d"), profile, history)
    reply, stats = run_in_child(after_restart, str(tmp_path / "d"), profile, history)
    assert reply.tokens == wanted.tokens
    assert reply.storage == (256 if read else 0)
    assert stats.get("disk_loaded_blocks", 0) == (4 if read else 0)
    assert ("prefetch_not_worth" in stats) != read


def tree_changes(form: str, profile: str) -> tuple[list[int], Reply, dict, int]:
    """Another user of the tree inserts 64 tokens of a hit while slots for it are allocated."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    core = engine(form, profile)
    asked = prompt(4, 200)
    wanted = core.ask(asked, 20, "kept").tokens
    core.ask(asked[:190], 1, "evicted")
    rows = [part[:64] for part in core.kv(asked[:64], "evicted")]
    core.settle()
    core.flood(random.Random(1), 2 * POOL)
    tree, allocate = core.tree, core.tree.allocate
    pool = core.scheduler.token_to_kv_pool_allocator.get_kvcache()

    def interrupted(count: int) -> torch.Tensor:
        slots, others = allocate(count), allocate(64)
        parts = [b[i] for i in range(pool.layer_num) for b in (pool.k_buffer, pool.v_buffer)]
        for part, saved in zip(parts, rows, strict=True):
            part[others] = saved
        key = RadixKey(array("q", asked[:64]), client_namespace(None, "evicted"))
        tree.insert(InsertParams(key=key, value=others))
        tree.allocate = allocate
        return slots

    tree.allocate = interrupted
    reply = core.ask(asked, 20, "evicted")
    core.settle()
    assert tree.allocate is allocate, "no slots were asked for"
    again = core.ask(asked, 20, "evicted")
    assert again.tokens == reply.tokens
    core.settle()
    return wanted, reply, tree.stats(), again.device


def test_a_tree_that_changed_meanwhile_ends_in_recomputation(models: None, tmp_path: Path) -> None:
    free = write(cost_model(), tmp_path)
    wanted, reply, stats, device = run_in_child(tree_changes, "hidden:2,kv:2", free)
    assert reply.tokens == wanted
    assert (reply.device, reply.host) == (0, 0)
    assert stats["restore_reason_tree_changed"] == 1
    assert "restorations" not in stats
    assert device > 190, "what was recomputed is in the tree"
