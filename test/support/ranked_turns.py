"""Two turns of a conversation on several ranks that forget everything between them, beside the same
conversation that stays on the device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from support.ranked_core import RankedCore

FLAGS = ("--max-total-tokens", "1600", "--dtype", "float32", "--hc-host-size-gb", "0.2")
BLOCKS = 256
"""Tokens of the full blocks of a first turn."""


class Turns(NamedTuple):
    """Two turns. said, wanted: replies of the conversation that stayed on the device. first,
    second: those of the one that was forgotten in between. stored: tokens that came from below host
    memory. counted: what this rank counted meanwhile."""

    said: list[int]
    wanted: list[int]
    first: list[int]
    second: list[int]
    stored: int
    counted: dict[str, int]


def prompts(name: str) -> tuple[list[int], list[int]]:
    rng = random.Random(name)
    return [rng.randrange(3, 900) for _ in range(200)], [rng.randrange(3, 900) for _ in range(20)]


def forget(core: RankedCore) -> None:
    """Everything forgets but what lies below host memory."""
    core.settle()
    assert core.scheduler.flush_cache()


def talk(core: RankedCore, name: str, between: Callable[[], None] = lambda: None) -> Turns:
    """between: runs on all ranks after the first turn was saved and forgotten."""
    prompt, follow = prompts(name)
    said = core.ask(prompt, 60, "kept").tokens
    wanted = core.ask([*prompt, *said, *follow], 24, "kept").tokens
    before = core.tree.tiers.counts()
    first = core.ask(prompt, 60, name).tokens
    forget(core)
    between()
    reply = core.ask([*prompt, *first, *follow], 24, name)
    core.settle()
    counts = core.tree.tiers.counts()
    counted = {key: value - before.get(key, 0) for key, value in counts.items()}
    return Turns(said, wanted, first, reply.tokens, reply.storage, counted)


def check_tokens(found: list[Turns]) -> None:
    for turns in found:
        assert (turns.first, turns.second) == (turns.said, turns.wanted)
        assert turns[:5] == found[0][:5], "all ranks saw the same"
    assert len({turns.counted.get("restored_tokens", 0) for turns in found}) == 1


def talk_and_stop(core: RankedCore) -> tuple[Turns, list[int]]:
    """Two turns, and the reply to the first turn of a conversation that another server goes on
    with: what of it is below host memory is all that is left."""
    turns = talk(core, "before")
    prompt, _ = prompts("later")
    left = core.ask(prompt, 60).tokens
    core.settle()
    core.tree.release_host_resources()
    return turns, left


def go_on(core: RankedCore) -> Turns:
    """The second turn of that conversation, beside both turns that stay on the device."""
    prompt, follow = prompts("later")
    said = core.ask(prompt, 60, "kept").tokens
    wanted = core.ask([*prompt, *said, *follow], 24, "kept").tokens
    reply = core.ask([*prompt, *said, *follow], 24)
    core.settle()
    return Turns(said, wanted, said, reply.tokens, reply.storage, core.tree.tiers.counts())
