"""Two tensor-parallel ranks, or two stages of a pipeline, of which each evicts by its own copy of
soft retention and learned pauses: they decide alike, line by line."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from sglang_hc.policy import pauses
from sglang_hc.srt.tree import capturing_tree
from support.decisions import note_decisions
from support.ranked_core import CORES, run_ranks

TALKS = 7
FLAGS = (
    "--max-total-tokens", "1200", "--dtype", "float32", "--hc-host-size-gb", "0.003",
    "--max-running-requests", "6", "--hc-forms", "kv", "--hc-eviction", "learned",
)  # fmt: skip
"""For a host tier that holds two or three of the conversations."""

WISHES: tuple[dict[str, Any], ...] = (
    {}, {"ttl_s": 0.4}, {"ttl_s": 30, "priority": 60, "tokens": 128}, {"ttl_s": 30, "priority": 0}
)  # fmt: skip
"""Of agents, as `hc_retain`."""


def talk(rank: int, port: int, kind: str) -> tuple[list[Any], dict[str, int], list[Any], list[Any]]:
    """Conversations whose clients go on after each turn, after two or never, call tools and say
    what they want. Returns the replies, what was counted, each decision, and what host memory's
    blocks are worth at last."""
    pauses.EVIDENCE = 4
    core = CORES[kind](rank, port, *FLAGS, model="llama-gqa")
    tiers, notes, tools = core.tree.tiers, list[Any](), dict[str, str]()
    note_decisions(tiers, notes)
    capturing_tree.called_by = lambda req: tools.get(req.rid, "")  # type: ignore[assignment]
    rng, replies = random.Random(5), []
    said = [rng.choices(range(3, 900), k=190) for _ in range(TALKS)]
    for turn in range(5):
        asked = {}
        for number in range(TALKS):
            if turn % (1 + number % 3) or len(said[number]) > 400:
                continue
            wish = rng.choice(WISHES)
            custom = {"hc_retain": {**wish, "session": f"s{number}"}} if wish else {}
            salt = rng.choice([None, "acme"]) if not turn else None
            rid = core.submit(said[number], 8, salt, custom_params=custom)
            asked[number], tools[rid] = rid, ("read", "build")[number % 2]
        core.run()
        for number, rid in asked.items():
            replies.append(core.reply(rid).tokens)
            said[number] += [*replies[-1], *rng.choices(range(3, 900), k=20)]
        time.sleep(0.2 if rank == 0 else 0.0)  # time passes on one of their clocks
        core.settle()
    value, owners = tiers.retention.soft.value, tiers.away._policy._owners
    worth = [
        (node.slot, value(node.block_id), owners.value(node.block_id))
        for node in tiers.host.tree.nodes()
    ]
    return replies, tiers.counts() | {"sessions": len(tiers.retention.sessions)}, notes, worth


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp", "pp"])
def test_ranks_keep_and_evict_alike(models: None, kind: str) -> None:
    (replies, counts, notes, worth), others = run_ranks(talk, kind)
    assert replies == others[0] and notes == others[2] and worth == others[3]
    assert len(notes) > 200 and any(own for _, _, own in worth)
    for name in ("retentions", "demotions", "sessions", "sessions_back", "evicted_blocks"):
        assert counts[name] == others[1][name] > 0, counts
    assert counts["sessions_back"] >= 4
