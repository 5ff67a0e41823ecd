"""RECOMPUTE form under SGLang's real scheduler: chunks, prefixes, batches, failures."""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.core import Core, run_in_child
from support.profiles import cost_model, write
from support.prompts import SMALL, prompt

PLAN = "recompute:1,hidden:1,kv:2"
LAYERS = 4
CHUNK = 64


def engine(*flags: str, model: str = "llama-gqa", plan: str = PLAN) -> Core:
    chunk = ("--chunked-prefill-size", str(CHUNK))
    return Core("--hc-forms", plan, *SMALL, *chunk, *flags, model=model)


def watch(core: Core, counts: list[int] | None = None) -> Counter:
    """Count what restorations recompute; with `counts`, have them recompute so much in turn."""
    tiers, seen = core.tree.tiers, Counter()
    restorer, recomputer = tiers.restorer, tiers.restorer.path.recomputer
    queued: list[Any] = []
    if counts:
        restorer.planner.share = lambda loads: tuple(load.recompute for load in loads)
    queue, start, run = restorer.queue, restorer.start, recomputer.forward_pass

    def queue_restore(restoration: Any, release: Any) -> None:
        if counts:
            restoration.recompute = counts[seen["restorations"] % len(counts)]
        seen["restorations"] += 1
        seen["prefixed"] += restoration.start > 0
        queued.append(restoration)
        queue(restoration, release)

    def start_restores() -> int:
        seen["largest pass"] = max(seen["largest pass"], len(queued))
        queued.clear()
        return start()

    def one_pass(tokens: Any, *rest: Any) -> None:
        assert len(tokens) <= CHUNK
        seen["passes"] += 1
        run(tokens, *rest)

    tiers.restorer.queue, tiers.restorer.start = queue_restore, start_restores
    tiers.restorer.path.recomputer.forward_pass = one_pass
    return seen


def error(wanted: list, found: list) -> float:
    """Largest difference of K/V over the tokens both have, relative to the layer's largest."""
    rows = min(wanted[0].shape[0], found[0].shape[0])
    assert rows > 0
    return max(
        float((a[:rows] - b[:rows]).abs().max() / a[:rows].abs().max())
        for a, b in zip(wanted, found, strict=True)
    )


def scenarios() -> dict[str, Any]:
    """One engine. Per salt the same requests; "evicted" leaves the device before each step."""
    core = engine()
    seen = watch(core)
    found: dict[str, Any] = {"tokens": {}, "errors": []}
    history = prompt(2, 230)  # four chunks
    branches = [[*history[:200], *prompt(20 + i, 10 + 5 * i)] for i in range(3)]
    originals = {}
    for salt in ("kept", "evicted"):
        replies = found["tokens"][salt] = []

        def leave(salt: str = salt) -> None:
            if salt == "evicted":
                core.push_out()

        def compare(key: str, tokens: list[int], salt: str = salt) -> None:
            rows = core.kv(tokens, salt)
            if salt == "kept":
                originals[key] = rows
            else:
                found["errors"].append(error(originals[key], rows))

        first = core.ask(history, 20, salt)
        replies.append(first.tokens)
        talk = [*history, *first.tokens]

        leave()  # longer than a chunk, from nothing
        replies.append(core.ask([*talk, *prompt(3, 20)], 10, salt).tokens)
        compare("whole", talk)

        leave()  # the first 99 tokens come back alone, the rest is recomputed behind them
        replies.append(core.ask(talk[:100], 2, salt).tokens)
        before = seen["prefixed"]
        replies.append(core.ask([*talk, *prompt(4, 9)], 10, salt).tokens)
        found[f"{salt} prefixed"] = seen["prefixed"] - before
        compare("prefixed", talk)

        leave()  # several in one pass, each behind the last one's slots
        rids = [core.submit(tokens, 8, salt) for tokens in [talk[:120], *branches]]
        core.run()
        replies += [core.reply(rid).tokens for rid in rids]
        for index, tokens in enumerate(branches):
            compare(f"branch {index}", tokens)
        core.settle()
    found["seen"] = dict(seen)
    found["stats"] = core.tree.stats()
    return found


def test_chunks_prefixes_and_batches(models: None) -> None:
    found = run_in_child(scenarios)
    assert found["tokens"]["evicted"] == found["tokens"]["kept"]
    assert max(found["errors"]) <= 1e-5
    assert found["kept prefixed"] == 0 and found["evicted prefixed"] == 1
    seen = found["seen"]
    assert seen["largest pass"] >= 2
    assert seen["passes"] > seen["restorations"]
    assert found["stats"]["recomputed_layer_tokens"] == found["stats"]["restored_tokens"]


def more_than_the_plan(plan: str) -> tuple[list, list, float, dict, int]:
    """Three turns beside two other conversations; restorations recompute 2, 4, 1, ... layers."""
    core = engine(plan=plan)
    seen = watch(core, [2, LAYERS, 1, 3])
    tokens: dict[str, list] = {"kept": [], "evicted": []}
    states: dict[str, list] = {}
    for salt in tokens:
        talks = [[*prompt(1, 70), *prompt(60 + i, 30 * i)] for i in range(3)]
        for turn in range(3):
            if salt == "evicted":
                core.push_out()
            rids = [core.submit(talk, 8, salt) for talk in talks]
            core.run()
            for index, rid in enumerate(rids):
                talks[index] += [*core.reply(rid).tokens, *prompt(100 + turn, 11)]
        tokens[salt] = talks
        states[salt] = [core.kv(talk, salt) for talk in talks]
        core.settle()
    worst = max(error(a, b) for a, b in zip(states["kept"], states["evicted"], strict=True))
    return tokens["kept"], tokens["evicted"], worst, core.tree.stats(), seen["largest pass"]


@pytest.mark.parametrize("plan", [PLAN, "hidden:4"])
def test_a_restoration_may_recompute_more_than_its_plan(models: None, plan: str) -> None:
    kept, evicted, worst, stats, largest = run_in_child(more_than_the_plan, plan)
    assert evicted == kept
    assert worst <= 1e-5
    assert largest > 1
    assert stats["recomputed_layer_tokens"] > stats["restored_tokens"]


def orphaned() -> tuple[int, float]:
    """Slots are promised to a request whose batch does not come."""
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    core = engine()
    history = prompt(2, 230)
    core.ask(history, 4)
    originals = core.kv(history)
    core.push_out()
    tree = core.tree
    req = SimpleNamespace(
        rid="orphan",
        kv=SimpleNamespace(holds_kv=False),
        prefix_len=0,
        full_untruncated_fill_ids=array("q", history),
        extra_key=None,
        last_node=tree.root_node_handle(),
        host_hit_length=200,
        retracted_stain=False,
        lora_id=None,
        session=None,
        priority=None,
        time_stats=SimpleNamespace(trace_ctx=SimpleNamespace(tracing_enable=False)),
    )
    key = RadixKey(req.full_untruncated_fill_ids, None)
    tree.match_prefix(MatchPrefixParams(key=key, req=req))  # as SGLang does before it admits
    count, _ = tree.init_load_back(
        InitLoadBackParams(best_match_node=req.last_node, host_hit_length=200, req=req)
    )
    tree.check_hicache_events()
    core.settle()
    return count, error(originals, core.kv(history))


def test_a_restoration_whose_batch_does_not_come_is_recomputed_too(models: None) -> None:
    count, off = run_in_child(orphaned)
    assert count == 200 and off <= 1e-5


def spoiled(how: str) -> tuple[Any, ...]:
    """A recomputation that does nothing, or fails."""
    core = engine()
    history = prompt(2, 230)
    first = core.ask(history, 20, "kept")
    talk = [*history, *first.tokens, *prompt(3, 20)]
    wanted, originals = core.ask(talk, 20, "kept").tokens, core.kv(history, "kept")
    core.ask(history, 20, "evicted")
    core.push_out()

    def fail(*batch: Any) -> None:
        if how == "raises":
            raise MemoryError("no room for activations")

    core.tree.tiers.restorer.path.recomputer.forward_pass = fail
    try:
        found = core.ask(talk, 20, "evicted").tokens
    except MemoryError:
        table = core.scheduler.req_to_token_pool.req_to_token
        return "raised", bool((table[0] == 0).all())
    return wanted == found, error(originals, core.kv(history, "evicted"))


SHARED = cost_model(host=1e-4, project=1e-9, prefill=1.2e-4, hidden_share=1.0)
"""A restoration recomputes one layer if it is alone; of several some recompute all but one."""


def together(profile: str) -> tuple[bool, float, list[tuple[Any, Any]]]:
    """Three histories come back in one pass: whether the replies are those of histories that had
    never left, the largest difference of K and V, and of each pass (recomputed alone, so)."""
    flags = ("--max-total-tokens", "1024", "--chunked-prefill-size", "1024")
    core = Core("--hc-forms", "kv", *SMALL, *flags, profile=profile)
    core.believe_profile()
    planner, passes = core.tree.tiers.restorer.planner, []
    share = planner.share

    def seen(loads: Any) -> Any:
        way = share(loads)
        passes.append((tuple(load.recompute for load in loads), way))
        return way

    planner.share = seen
    replies: dict[str, list[list[int]]] = {"kept": [], "evicted": []}
    rows: dict[str, list[Any]] = {"kept": [], "evicted": []}
    for salt, said in replies.items():
        talks = [prompt(30 + i, 130 + 40 * i) for i in range(3)]
        talks = [[*talk, *core.ask(talk, 8, salt).tokens] for talk in talks]
        if salt == "evicted":
            core.push_out()
        passes.clear()
        rids = [core.submit([*talk, *prompt(40, 9)], 6, salt) for talk in talks]
        core.run()
        said += [core.reply(rid).tokens for rid in rids]
        rows[salt] = [core.kv(talk, salt) for talk in talks]
    core.settle()
    off = max(error(a, b) for a, b in zip(rows["kept"], rows["evicted"], strict=True))
    return replies["evicted"] == replies["kept"], off, passes


@pytest.mark.slow
def test_a_batch_decides_together_who_recomputes(models: None, tmp_path: Path) -> None:
    same, off, passes = run_in_child(together, write(SHARED, tmp_path))
    assert same and off <= 1e-5
    (alone, way) = max(passes, key=lambda one: len(one[0]))
    assert len(alone) >= 2 and way != alone and max(way) > max(alone)


def test_layers_left_out_are_noticed(models: None) -> None:
    """The control: were recomputed layers not used, or not compared, the tests would be blind."""
    same, off = run_in_child(spoiled, "nothing")
    assert not same and off > 0.1


def test_an_error_in_the_layers_ends_the_scheduler_and_serves_nothing(models: None) -> None:
    """As in a forward pass: the slots were promised and do not hold the state."""
    assert run_in_child(spoiled, "raises") == ("raised", True)


def unusable(model: str) -> tuple[Any, Any, str]:
    """What the check at start says of the right recomputer, of one that loses the prefix, and of
    one whose decode steps do not run."""
    from sglang_hc.srt.model.recompute import compare_pieces
    from sglang_hc.srt.ranks.start_group import StartGroup

    core = engine(model=model, plan="kv")
    tiers, allocator = core.tree.tiers, core.scheduler.token_to_kv_pool_allocator
    slots = allocator.alloc(32)
    dtype = core.scheduler.tp_worker.model_runner.kv_cache_dtype
    run = tiers.restorer.path.recomputer.forward_pass

    def found() -> Any:
        path, alone = tiers.restorer.path, StartGroup(0, 1)
        return compare_pieces(path.recomputer, path.sink, slots, dtype, 2, alone)

    def lost(tokens: Any, slots: Any, start: int, *rest: Any) -> None:
        core.scheduler.req_to_token_pool.req_to_token[0, :start] = 0
        run(tokens, slots, start, *rest)

    def no_decode(tokens: Any, slots: Any, start: int, decode: bool, adapter: Any) -> None:
        if decode:
            raise RuntimeError("no such batch")
        run(tokens, slots, start, decode, adapter)

    good = found()
    tiers.restorer.path.recomputer.forward_pass = no_decode
    unproven = found()
    tiers.restorer.path.recomputer.forward_pass = lost
    return good, unproven, str(found().wrong)


@pytest.mark.parametrize("model", ["llama-gqa", "deepseek-v2"])
def test_the_check_at_start_notices_a_lost_prefix(models: None, model: str) -> None:
    good, unproven, lost = run_in_child(unusable, model)
    assert good.wrong is None and good.difference <= 1e-5
    assert good.bit == (good.difference == 0.0)
    assert unproven.wrong is None and not unproven.bit
    assert "in one piece and in two differ" in lost
