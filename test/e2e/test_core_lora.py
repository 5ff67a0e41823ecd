"""Adapters behind a cut: what an adapter has computed moves, and serves no other one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest

from support.adapters import adapter_flags, adapter_ids, write_adapter
from support.core import Core, run_in_child

MODEL, TURNS = "llama-gqa", 6
FLAGS = (
    *("--context-length", "512", "--hc-overflow-drop", "0.34", "--hc-overflow-reserve", "64"),
    *("--max-total-tokens", "2048", "--hc-host-size-gb", "0.2", "--dtype", "float32"),
)


class Talk(NamedTuple):
    """Replies, and per turn the tokens that were found."""

    replies: list[list[int]]
    found: list[int]


def talk(core: Core, lora: str | None, salt: str | None, evict: bool) -> Talk:
    """Turns of a conversation whose prompts are the same whatever is replied; most are cut."""
    rng = random.Random(1)
    history, found = [rng.randrange(3, 900) for _ in range(380)], Talk([], [])
    for _ in range(TURNS):
        history += [rng.randrange(3, 900) for _ in range(70)]
        core.settle()
        if evict:
            core.evict()
        rid = core.submit(history, 12, salt, lora=lora)
        core.run()
        reply = core.reply(rid)
        found.replies.append(reply.tokens)
        found.found.append(reply.cached)
    core.settle()
    return found


def talks(mode: str, adapters: dict[str, str]) -> tuple[dict[str, list[Talk]], dict[str, int]]:
    """By adapter, and "none": kept on the device, evicted between turns."""
    core = Core("--hc-overflow", mode, *adapter_flags(adapters, 2), *FLAGS, model=MODEL)
    ids = adapter_ids(core)
    found: dict[str, list[Talk]] = {name: [] for name in (*ids, "none")}
    for salt, evict in ((None, False), ("evicted", True)):
        for name, talked in found.items():  # in turns, with the same prompts and key
            talked.append(talk(core, ids.get(name), salt, evict))
    return found, core.tree.tiers.counts()


@pytest.mark.parametrize("mode", ["recompute", "reembed"])
def test_state_behind_a_cut_belongs_to_its_adapter(models: None, tmp_path: Path, mode: str) -> None:
    adapters = {name: write_adapter(tmp_path / name, i, MODEL) for i, name in enumerate("ab")}
    found, counts = run_in_child(talks, mode, adapters)
    for name, (kept, evicted) in found.items():
        assert evicted.replies == kept.replies, name
        assert kept.found[0] == evicted.found[0] == 0, "state of another adapter was found"
        assert min(evicted.found[2:]) >= 64
        if mode == "reembed":
            assert min(evicted.found[2:]) >= 256
    replies = [kept.replies for kept, _ in found.values()]
    assert all(a != b for a, b in zip(replies, replies[1:] + replies[:1], strict=True))
    assert (counts.get("overflow_moved_tokens", 0) > 0) == (mode == "reembed")
