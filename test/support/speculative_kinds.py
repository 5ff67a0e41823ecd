"""Speculative decoding with models whose layers do not all have full attention, and a conversation
with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from support import window_core, window_kernels
from support.core import Core
from support.prompts import SMALL
from support.speculation import SpeculativeCore
from support.speculative_talks import SAID

ROOMY = ("--max-total-tokens", "4096", "--hc-disable")


class Kept(NamedTuple):
    """A conversation. cached: per turn tokens from device, host and disk. accepted: of each verify
    pass the tokens. draft_kv: of all of it; nothing without a draft model."""

    history: list[int]
    tokens: list[list[int]]
    cached: list[tuple[int, int, int]]
    accepted: list[int]
    proposed: list[list[int]]
    stats: dict[str, Any]


Start = Callable[..., Core]
"""Starts an engine with a model and flags; with `taught` and `overlap` as `SpeculativeCore`."""


def with_windows(model: str, *flags: str, **options: Any) -> SpeculativeCore:
    """model: path of one of `window_model`."""
    window_kernels.use()
    return SpeculativeCore(*window_core.flags_of(model), *SMALL, *flags, model=model, **options)


def plainly(start: Start, model: str, *flags: str) -> Kept:
    """Without speculation and tiers, on a device that never evicts."""
    return talk(start(model, *ROOMY, *flags), evict=False)


def talk(
    core: Core, evict: bool, told: Sequence[int] = (), turns: range = range(len(SAID))
) -> Kept:
    """told: before these turns. evict: others write over everything on the device between two."""
    history, tokens, cached = list(told), list[list[int]](), list[tuple[int, int, int]]()
    for turn in turns:
        history += SAID[turn]
        if turn > turns[0] and evict:
            core.settle()
            core.evict()
            core.flood(random.Random(turn), 2 * core.scheduler.max_total_num_tokens)
        reply = core.ask(history, 40)
        tokens.append(reply.tokens)
        cached.append((reply.device, reply.host, reply.storage))
        history += reply.tokens
    accepted, proposed = list[int](), list[list[int]]()
    if isinstance(core, SpeculativeCore):
        accepted = [sum(row >= 0 for path in batch for row in path) for batch in core.accepted]
        proposed = core.proposed
    if evict:
        core.settle()
    return Kept(history, tokens, cached, accepted, proposed, core.tree.stats() if evict else {})


def speculating(
    start: Start, model: str, taught: list[int], evict: bool, overlap: bool, *flags: str
) -> Kept:
    return talk(start(model, *flags, taught=[taught], overlap=overlap), evict)
