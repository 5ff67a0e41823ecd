"""Tokens of prompts by source add up to what clients are told, whatever happens to requests."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.core import Core, run_in_child
from support.prompts import SMALL, in_directory, on_disk, prompt
from support.retractions import retract_often

SOURCES = ("device", "host", "disk", "remote", "computed", "aborted")
CHUNKED = ("--chunked-prefill-size", "64", "--enable-mixed-chunk")


class Told:
    """What SGLang tells clients of prompts that were served: the numbers of its replies, and its
    own split of them."""

    def __init__(self, core: Core) -> None:
        self.prompts = self.device = self.host = self.below = 0
        self.details: list[Any] = []
        streamer, seen = type(core.scheduler.output_streamer), dict[int, Any]()
        stream, details = streamer.stream_output, streamer.get_cached_tokens_details

        def streamed(self: Any, reqs: list[Any], logprob: bool, skip_req: Any = None) -> Any:
            stream(self, reqs, logprob, skip_req)
            for req in reqs:
                if req is skip_req or id(req) in seen or not req.finished_output:
                    continue
                seen[id(req)] = req  # no other gets its id
                told.prompts += len(req.origin_input_ids)
                told.device += req.cached_tokens_device
                told.host += req.cached_tokens_host
                told.below += req.cached_tokens_storage

        def detailed(self: Any, req: Any) -> Any:
            found = details(self, req)
            if req.finished():
                told.details.append(found)
            return found

        told = self
        streamer.stream_output, streamer.get_cached_tokens_details = streamed, detailed


def by_source(core: Core) -> dict[str, int]:
    counts = core.tree.reporting.prompts.counts
    assert set(counts) == {f"prompt_tokens_{source}" for source in SOURCES}
    assert all(count >= 0 for count in counts.values())
    return {source: counts[f"prompt_tokens_{source}"] for source in SOURCES}


def check(core: Core, told: Told) -> dict[str, int]:
    core.settle()
    found = by_source(core)
    assert sum(found.values()) == told.prompts
    assert (found["device"], found["host"]) == (told.device, told.host)
    assert found["disk"] + found["remote"] == told.below
    shown = [one for one in told.details if one is not None and "storage" in one]
    assert all(one["disk"] + one["remote"] == one["storage"] for one in shown)
    assert sum(one["disk"] for one in shown) == found["disk"]
    return found


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
