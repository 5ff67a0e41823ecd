"""Audits under SGLang's real scheduler: wrong blocks leave every tier, requests come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_hc.config import HcConfig
from sglang_hc.policy.audit import MOST_SAMPLES, STOP_AFTER, bound
from sglang_hc.srt.model.startup_checks import TOLERANCE
from sglang_hc.srt.tree import audit
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import Prefix, pack_tokens
from support import waiting
from support.adapters import adapter_flags, adapter_ids, write_adapter
from support.audits import ALL, audit_all, below, leave, path_of, server
from support.core import Core, Once, Reply, run_in_child
from support.prompts import prompt
from support.versions import new_version

MODEL = "llama-gqa"

# -- what is wrong is found --------------------------------------------------------------------

PROMPT, OTHER = prompt(3, 200), prompt(4, 200)
WRONG = 1
"""The block of a path that is planted."""


def plant(core: Core, tokens: list[int], place: int = WRONG) -> None:
    """In host memory a block has the bytes of other tokens."""
    core.settle()
    pool = core.tree.tiers.restorer.path.pool
    path = path_of(core, tokens)
    pool.slot(path[place].slot)[:] = pool.slot(path[place - 1].slot)


def plant_before_it_is_written(core: Core) -> None:
    """Blocks at this place are written below with the bytes of the block before them, by the
    server's own writer: with valid digests."""
    capture, pool = core.tree.tiers.capture, core.tree.tiers.restorer.path.pool
    write = capture._on_ready

    def wrong(node: BlockNode) -> None:
        if len(node.path()) - 1 == WRONG and node.namespace is None:
            assert node.parent is not None
            pool.slot(node.slot)[:] = pool.slot(node.parent.slot)
        write(node)

    capture._on_ready = wrong


def found_and_dropped(form: str, tier: str, folder: str) -> tuple[Reply, dict[str, Any], dict]:
    core = server(form, *ALL, *below(tier, folder))
    if tier != "host":
        plant_before_it_is_written(core)
    core.ask(PROMPT, 1)
    core.ask(OTHER, 1, salt="other")
    if tier == "host":
        plant(core, PROMPT)
    else:
        core.settle()
        core.tree.tiers.capture._on_ready = core.tree.tiers.disk.write_through
    leave(core, tier)
    restored = core.ask(PROMPT, 1)
    assert restored.cached >= 128, "the wrong block was not restored"
    counts = audit_all(core)
    shown = {"device": len(core.slots(PROMPT)), "host": len(path_of(core, PROMPT))}
    if tier != "host":
        disk, ids = core.tree.tiers.disk, core.tree.tiers.host.tree.identities
        waiting.until(lambda: not disk.busy, lambda: core.run(1))
        shown["holds"] = [disk.holds(name) for name in ids(Prefix(None, pack_tokens(PROMPT)))]
    after = core.ask(PROMPT, 16)
    leave(core, tier)
    again = core.ask(PROMPT, 16)
    assert again.tokens == after.tokens
    other = core.ask(OTHER, 1, salt="other")
    assert other.cached >= 192 and audit_all(core)["audit_differences"] == 1
    return after, counts, shown | {"again": again.storage}


def right_replies() -> tuple[list[int], list[int]]:
    """To PROMPT and OTHER."""
    core = server("kv", "--hc-audit", "0")
    return core.ask(PROMPT, 16).tokens, core.ask(OTHER, 16).tokens


@pytest.mark.parametrize(
    ("form", "tier"),
    [
        ("kv", "host"),
        ("hidden", "host"),
        ("hidden:2,kv:2", "host"),
        ("hidden:2,kv:2", "disk"),
        ("hidden:2,kv:2", "remote"),
    ],
)
def test_a_block_of_other_tokens_leaves_every_tier(
    once: Once, tmp_path: Path, form: str, tier: str
) -> None:
    after, counts, shown = run_in_child(found_and_dropped, form, tier, str(tmp_path / "d"))
    assert counts["audit_differences"] == 1
    assert (shown["device"], shown["host"]) == (64, 1), "its branch is still there"
    if tier != "host":
        # A disk erases the whole path. A store of files deletes nothing: what is behind the block
        # is there, and not looked for.
        stays = tier == "remote"
        assert shown["holds"] == [stays, False, stays]
        assert shown["again"] == 64 * stays
    assert after.tokens == once(right_replies)[0]
    assert after.cached == 64
    if tier == "disk":
        reply = run_in_child(restarted, form, str(tmp_path / "d"))
        assert (reply.tokens, reply.storage) == (after.tokens, 64), "it came back"


def restarted(form: str, folder: str) -> Reply:
    return server(form, "--hc-audit", "0", *below("disk", folder)).ask(PROMPT, 16)


def slightly_off(form: str, dtype: str) -> list[dict[str, int]]:
    """What was counted when one element of the first layer of a block is off by less than the
    bound, then of another prompt's by more."""
    core, counts = server(form, *ALL, dtype=dtype), []
    for tokens, times in ((PROMPT, 0.4), (OTHER, 2.5)):
        core.ask(tokens, 1)
        core.settle()
        pool, slot = core.tree.tiers.restorer.path.pool, path_of(core, tokens)[1].slot
        chunk = (pool.hidden if form == "hidden" else pool.kv[1])[slot, 0]
        rows = torch.from_numpy(chunk).view(getattr(torch, dtype))
        allowed = bound(TOLERANCE[rows.dtype], 0) * float(rows.float().abs().max())
        rows[63, 0] += times * allowed
        core.evict()
        core.ask(tokens, 1)
        counts.append(audit_all(core))
    return counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["kv", "hidden"])
def test_one_number_off_by_more_than_the_bound_is_found(
    models: None, form: str, dtype: str
) -> None:
    less, more = run_in_child(slightly_off, form, dtype)
    assert "audit_differences" not in less and less["audited_blocks"] >= 3
    assert more["audit_differences"] == 1


def wrong_often(form: str) -> list[tuple[list[int], dict[str, Any], int, int]]:
    """Before the last difference that is allowed and behind it: the reply to a new prompt that left
    the device, what was counted, new blocks, and tokens of the prompt that were found."""
    core, found = server(form, *ALL), []

    def one_more(seed: int) -> None:
        tokens = prompt(seed, 200)
        core.ask(tokens, 1)
        plant(core, tokens)
        core.evict()
        core.ask(tokens, 1)
        audit_all(core)

    def go_on(asked: list[int]) -> None:
        saved = core.tree.tiers.host.published_blocks
        core.ask(asked, 1)
        core.settle()
        new = core.tree.tiers.host.published_blocks - saved
        core.evict()
        reply = core.ask(asked, 16)
        core.settle()
        found.append((reply.tokens, core.tree.stats(), new, reply.cached))

    for seed in range(STOP_AFTER - 1):
        one_more(20 + seed)
    go_on(OTHER)
    one_more(20 + STOP_AFTER)
    go_on(PROMPT)
    return found


@pytest.mark.parametrize("form", ["kv", "hidden"])
def test_a_form_that_is_wrong_too_often_is_not_used_any_more(once: Once, form: str) -> None:
    wanted = once(right_replies)
    before, behind = run_in_child(wrong_often, form)
    tokens, stats, new, cached = before
    assert tokens == wanted[1] and cached == 199 and new == 4
    assert stats["audit_differences"] == STOP_AFTER - 1 and "audit_stops" not in stats
    tokens, stats, new, cached = behind
    assert tokens == wanted[0] and (cached, new) == (0, 0)
    assert (stats["audit_differences"], stats["audit_stops"]) == (STOP_AFTER, 1)


# -- requests come first -----------------------------------------------------------------------


def interrupted(pool: str) -> tuple[list[int], bool, dict[str, int]]:
    """A request of a user while one chunk of an audit is computed. Its tokens, whether the audit
    went on behind it, counts."""
    core = server("kv", *ALL, "--max-total-tokens", pool)
    core.ask(prompt(6, 300), 1)
    core.settle()
    core.evict()
    own = core.tree.audit
    own._chunk = 64  # so that the idle passes behind a request do not end it
    core.ask(prompt(6, 300), 1)
    assert own.held.slots > 0 and 0 < own._pass.done < 300, "no audit is under way"
    core.check_device()
    under_way, step, seen = own._pass, own.step, []

    def noted(tree: Any) -> bool:
        seen.append((own._pass, rid in core.requests and core.requests[rid].finished()))
        return step(tree)

    own.step = noted
    rid = core.submit(OTHER, 16)
    core.run()
    assert all(finished for _, finished in seen), "an audit ran beside a request"
    return core.reply(rid).tokens, seen[0][0] is under_way, audit_all(core)


@pytest.mark.parametrize(("pool", "goes_on"), [("2048", True), ("768", False)])
def test_a_request_comes_before_the_audit(once: Once, pool: str, goes_on: bool) -> None:
    """Where the device has room for both the audit waits, else it ends."""
    tokens, waited, counts = run_in_child(interrupted, pool)
    assert tokens == once(right_replies)[1]
    assert waited == goes_on
    assert "audit_differences" not in counts
    assert (counts.get("audited_blocks", 0) >= 4) == goes_on


def emptied(how: str) -> dict[str, int]:
    core = server("kv", *ALL)
    core.ask([*PROMPT, *OTHER], 1)
    core.settle()
    core.evict()
    core.tree.audit._chunk = 64
    core.ask([*PROMPT, *OTHER], 1)
    assert core.tree.audit.held.slots
    if how == "flush":
        assert core.scheduler.flush_cache()
    else:
        new_version(core)
    assert not core.tree.audit.waiting
    core.settle()
    core.ask(PROMPT, 1)
    return audit_all(core)


@pytest.mark.parametrize("how", ["flush", "weights"])
def test_an_emptied_server_audits_nothing_of_before(models: None, how: str) -> None:
    counts = run_in_child(emptied, how)
    assert "audit_differences" not in counts and counts["audit_skipped_blocks"] >= 3


def failing(where: str) -> tuple[dict[str, int], int, list[int]]:
    """What was counted, pins and samples that are left, and a reply."""
    core = server("kv", *ALL)
    core.ask(PROMPT, 1)
    core.settle()
    core.evict()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    if where == "a pass":
        core.tree.audit._model.recompute = fail
    else:
        audit.AuditRoom.taken = fail  # type: ignore[method-assign]
    core.ask(PROMPT, 1)
    audit_all(core)
    core.evict()
    reply = core.ask(PROMPT, 16)
    counts = audit_all(core)
    held = sum(node.pins for node in core.tree.tiers.host.tree.nodes())
    return counts, held + core.tree.audit.waiting, reply.tokens


@pytest.mark.parametrize("where", ["a pass", pytest.param("its room", marks=pytest.mark.slow)])
def test_an_audit_that_fails_costs_audits_only(once: Once, where: str) -> None:
    counts, held, tokens = run_in_child(failing, where)
    assert "audited_blocks" not in counts and held == 0
    assert tokens == once(right_replies)[0]


# -- what is audited ---------------------------------------------------------------------------


def off(model: str, *flags: str) -> tuple[bool, int]:
    core = server("kv", *flags, model=model)
    core.ask(PROMPT, 4)
    core.settle()
    core.evict()
    return core.tree.audit is None, core.ask(PROMPT, 4).cached


def test_a_share_of_nothing_is_not_audited(models: None) -> None:
    assert run_in_child(off, "llama-mha", "--hc-audit", "0") == (True, 199)


def test_the_default_is_small() -> None:
    assert 0 < HcConfig().audit <= 0.01


def limits() -> list[tuple[int, int]]:
    """Samples that wait, and blocks skipped, at each limit and beyond it."""
    core = server("kv", *ALL)
    rid = core.submit(PROMPT, 1)
    core.run()
    core.settle()
    tree, req, path = core.tree, core.requests[rid], path_of(core, PROMPT)
    found = []

    def sample(times: int, **settings: float) -> None:
        before = {name: getattr(audit, name) for name in settings}
        for name, value in settings.items():
            setattr(audit, name, value)
        tree.tiers.restorer.counters.clear()
        for _ in range(times):
            tree.audit.restored(req, path, 0, 200)
        counts = tree.tiers.counts()
        found.append((tree.audit.waiting, counts.get("audit_skipped_blocks", 0)))
        tree.audit.clear()
        for name, value in before.items():
            setattr(audit, name, value)

    sample(MOST_SAMPLES, PINNED_SHARE=1)
    sample(MOST_SAMPLES + 1, PINNED_SHARE=1)
    sample(1, MOST_TOKENS=256)
    sample(1, MOST_TOKENS=255)
    sample(1, PINNED_SHARE=4 / tree.tiers.host.num_slots)
    sample(1, PINNED_SHARE=3 / tree.tiers.host.num_slots)
    sample(2, PINNED_SHARE=8 / tree.tiers.host.num_slots)
    sample(2, PINNED_SHARE=7 / tree.tiers.host.num_slots)
    core.settle()
    return found


def test_samples_are_bounded(models: None) -> None:
    """The newest ones stay."""
    assert run_in_child(limits) == [
        (MOST_SAMPLES, 0), (MOST_SAMPLES, 4), (1, 0), (1, 1), (1, 0), (1, 1), (2, 0), (1, 4),
    ]  # fmt: skip


def adapters(folders: dict[str, str]) -> tuple[dict[str, int], dict[str, int]]:
    """With LoRA: what is right, then the blocks of one adapter under the tokens of the other."""
    core = server("kv", *ALL, *adapter_flags(folders, 1), model=MODEL)
    by_name, keys = adapter_ids(core), {}
    ids = [by_name[name] for name in sorted(by_name)]

    def ask() -> dict[str, int]:
        for lora in ids:  # an adapter is replaced by the other one on the device
            rid = core.submit(PROMPT, 1, lora=lora)
            core.run()
            keys[lora] = core.requests[rid].extra_key
        return audit_all(core)

    ask()
    core.evict()
    right = ask()
    pool = core.tree.tiers.restorer.path.pool
    (one, two) = (path_of(core, PROMPT, keys[lora]) for lora in ids)
    for mine, others in zip(one, two, strict=True):
        pool.slot(mine.slot)[:] = pool.slot(others.slot)
    core.evict()
    return right, ask()


def test_the_state_of_another_adapter_is_found(models: None, tmp_path: Path) -> None:
    folders = {name: write_adapter(tmp_path / name, i, MODEL) for i, name in enumerate("ab")}
    right, wrong = run_in_child(adapters, folders)
    assert right["audited_blocks"] >= 6 and "audit_differences" not in right
    assert wrong["audit_differences"] == 1, "its first block"


def after_cuts() -> dict[str, int]:
    overflow = ("--hc-overflow", "reembed", "--context-length", "512")
    more = ("--hc-overflow-drop", "0.34", "--hc-overflow-reserve", "64")
    core = server("kv", *ALL, *overflow, *more, "--max-total-tokens", "2048", model=MODEL)
    history = prompt(9, 380)
    for turn in range(5):
        history += prompt(30 + turn, 70)
        core.settle()
        core.evict()
        core.ask(history, 12)
        counts = audit_all(core)
    return counts


def test_state_that_moved_is_skipped(models: None) -> None:
    counts = run_in_child(after_cuts)
    assert counts["overflow_moved_tokens"] > 0 and counts["audit_skipped_blocks"] > 0
    assert "audited_blocks" not in counts
