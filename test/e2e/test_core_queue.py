"""The waiting queue decides: what it needs stays, and comes from disk before its turn."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from support.core import Core, Once, run_in_child
from support.prompts import SMALL, on_disk, prompt

FLAGS = ("--hc-forms", "kv", *SMALL, "--max-running-requests", "1")
TURNS = 12
PROMPTS = [prompt(seed, 190) for seed in range(TURNS)]


def second_turns(directory: str, eviction: str, prefetch: str, schedule: str) -> tuple:
    """Twelve conversations, of which the host tier holds two or three, come back at once."""
    core = Core(
        *FLAGS, "--hc-host-size-gb", "0.005", *on_disk(directory), "--hc-eviction", eviction,
        "--hc-prefetch", prefetch, "--hc-schedule", schedule,
    )  # fmt: skip
    histories = []
    for said in PROMPTS:
        histories.append(said + core.ask(said, 8).tokens)
        core.settle()
    rids = [core.submit([*history, 7, 8, 9], 4) for history in histories]
    core.run()
    replies = [core.reply(rid) for rid in rids]
    core.settle()
    return replies, core.tree.stats()


def never_evicted() -> list[list[int]]:
    core = Core(*FLAGS, "--max-total-tokens", "8000")
    histories = [said + core.ask(said, 8).tokens for said in PROMPTS]
    return [core.ask([*history, 7, 8, 9], 4).tokens for history in histories]


@pytest.mark.parametrize(
    ("eviction", "prefetch", "schedule"),
    [
        ("queue", "queue", "off"),
        ("queue", "queue", "ready-first"),
        pytest.param("learned", "queue", "off", marks=pytest.mark.slow),
        ("lru", "on-arrival", "off"),
        ("lru", "off", "off"),
    ],
)
def test_a_queue_of_returning_conversations(
    once: Once, tmp_path: Path, eviction: str, prefetch: str, schedule: str
) -> None:
    replies, stats = run_in_child(second_turns, str(tmp_path / "d"), eviction, prefetch, schedule)
    assert [reply.tokens for reply in replies] == once(never_evicted)
    served = sum(reply.cached >= 192 for reply in replies)
    if prefetch == "off":
        assert stats.get("disk_loaded_blocks", 0) == 0
        return
    assert stats["disk_loaded_blocks"] > 0
    if eviction != "lru":
        assert served == TURNS, stats
    else:  # what was read for one request may be evicted for the next, three times at most
        assert served > 0, stats


def order_of_service(schedule: str) -> list[str]:
    """A conversation whose state is in the host tier waits before one that needs nothing."""
    core = Core(*FLAGS, "--hc-schedule", schedule)
    old, new = PROMPTS[:2]
    reply = core.ask(old, 8).tokens
    core.settle()
    core.flood(random.Random(6), 1300)
    served: list[str] = []
    release = core.tree.on_release

    def released(req: Any, **kwargs: Any) -> None:
        served.append(req.rid)
        release(req, **kwargs)

    core.tree.on_release = released
    names = {core.submit([*old, *reply, 5], 4): "old", core.submit(new, 4): "new"}
    core.run()
    core.settle()
    return [names[rid] for rid in served]


def test_ready_first_serves_what_costs_least_to_restore(models: None) -> None:
    assert run_in_child(order_of_service, "off") == ["old", "new"]
    assert run_in_child(order_of_service, "ready-first") == ["new", "old"]
