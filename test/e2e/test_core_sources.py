"""Tokens of prompts by source add up to what clients are told, whatever happens to requests."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from support.core import Core, run_in_child
from support.prompts import SMALL, in_directory, on_disk, prompt
from support.retractions import retract_often
from support.told_prompts import Told, by_source, check_sources

CHUNKED = ("--chunked-prefill-size", "64", "--enable-mixed-chunk")


def check(core: Core, told: Told) -> dict[str, int]:
    core.settle()
    return check_sources(core, told)


def load(folder: str, seed: int) -> dict[str, int]:
    """Conversations of three turns, several at a time, some aborted while they wait, in the middle
    of a prompt, or while they decode, and all retracted every few passes."""
    retract_often()
    rng = random.Random(seed)
    core = Core("--hc-forms", "kv", *SMALL, *CHUNKED, *on_disk(folder))
    told, ends = Told(core), Counter[str]()
    talks = {n: prompt(n, 150 + 20 * n) for n in range(4)}
    for _ in range(3):
        rids = {n: core.submit(tokens, 20) for n, tokens in talks.items()}
        lost = [core.submit(prompt(rng.random(), 300), 30) for _ in range(3)]
        when = {rid: rng.randrange(1, 25) for rid in lost}

        def abort(number: int, when: dict[str, int] = when) -> None:
            for rid, at in when.items():
                if at == number:
                    core.abort(rid)

        core.run(each_pass=abort)
        for rid in lost:
            (req,) = core.named(rid)
            ends["served" if req.output_ids else "unserved"] += 1
        for n, rid in rids.items():
            talks[n] = [*talks[n], *core.reply(rid).tokens, *prompt(n + 100, 9)]
        core.tree.tiers.drain()
        core.evict()
    found = check(core, told)
    assert ends["unserved"] and sum(req.retraction_count for req in core.arrived)
    core.tree.release_host_resources()
    return found


def after_restart(folder: str, *below: str) -> dict[str, int]:
    core = Core("--hc-forms", "kv", *SMALL, *CHUNKED, *below, *on_disk(folder))
    told = Told(core)
    for n in range(4):
        core.ask(prompt(n, 150 + 20 * n), 4)  # from below
        core.ask(prompt(n, 150 + 20 * n), 4)  # from the device
    return check(core, told)


def test_sources_add_up_with_aborts_retractions_and_a_restart(tmp_path: Path) -> None:
    found = run_in_child(load, str(tmp_path), 1)
    assert found["host"] and found["computed"] and not found["remote"]
    again = run_in_child(after_restart, str(tmp_path))
    assert again["disk"] >= 4 * 128 and again["device"] and not again["remote"]


def first_server(shared: str) -> int:
    core = Core("--hc-forms", "kv", *SMALL, *in_directory(shared))
    for n in range(4):
        core.ask(prompt(n, 150 + 20 * n), 4)
    core.settle()
    core.tree.release_host_resources()
    return sum(by_source(core).values())


@pytest.mark.slow
def test_what_comes_from_a_store_is_told_from_what_comes_from_the_own_disk(tmp_path: Path) -> None:
    shared, own = str(tmp_path / "shared"), str(tmp_path / "own")
    assert run_in_child(first_server, shared) == sum(150 + 20 * n for n in range(4))
    found = run_in_child(after_restart, own, *in_directory(shared))
    assert found["remote"] >= 4 * 128 and not found["disk"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_sources_add_up_in_other_loads(tmp_path: Path, seed: int) -> None:
    run_in_child(load, str(tmp_path), seed)
