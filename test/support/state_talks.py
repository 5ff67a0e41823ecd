"""Conversations with a model that has recurrent layers: what each of them computes, what branches,
what is evicted in parts, who makes room, and random ones beside those that stay on the device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from support import retractions
from support.core import Reply
from support.during import When
from support.prompts import prompt
from support.state_core import engine


class Turn(NamedTuple):
    """A turn of a conversation. computed: tokens of its prompt. new: of these, those that no turn
    before had computed."""

    reply: list[int]
    computed: int
    new: int


def talk(model: str, turns: int, evicts: bool, *flags: str) -> list[Turn]:
    """One conversation. evicts: the device forgets it behind each turn."""
    core = engine(model, "--max-total-tokens", "2048", *flags)
    found, history = list[Turn](), list[int]()
    for number in range(turns):
        own = prompt(number, 5 + 23 * number % 90)
        reply = core.ask([*history, *own], 20 + 7 * number % 30, "talk")
        # The last token of a reply is not computed before the next turn.
        found.append(Turn(reply.tokens, len(history) + len(own) - reply.cached, len(own) + 1))
        history += [*own, *reply.tokens]
        if evicts:
            core.tree.tiers.drain()
            core.evict()
    return found


def branches(model: str, evicts: bool) -> list[Reply]:
    """Three prompts with 200 tokens in common."""
    core, shared, found = engine(model), prompt("shared", 200), []
    for number in range(3):
        found.append(core.ask([*shared, *prompt(number, 90)], 16))
        if evicts:
            core.tree.tiers.drain()
            core.evict()
    core.settle()
    return found


def leaves(model: str, evicts: bool) -> list[Reply]:
    """Two prompts with 200 tokens in common, with short replies, and what follows on the second."""
    core, shared, more = engine(model), prompt("shared", 200), prompt("more", 40)
    found, said = list[Reply](), list[int]()
    for tokens in ([*shared, *prompt("one", 90)], [*shared, *prompt("other", 150)]):
        found.append(core.ask(tokens, 4))
        said = [*tokens, *found[-1].tokens]
        if evicts:
            core.tree.tiers.drain()
            core.evict()
    found.append(core.ask([*said, *more], 16))
    return found


class Parted(NamedTuple):
    """The reply to a prompt whose state has left the device, and its K and V have not. stats:
    behind it."""

    reply: Reply
    stats: dict[str, Any]


def parted(model: str, evicts: bool) -> Parted:
    """evicts: the states of a conversation leave, oldest first, and what hangs on the last one."""
    core, first = engine(model), prompt("first", 200)
    reply = core.ask(first, 70).tokens
    core.settle()
    if evicts:
        core.tree.evict(EvictParams(num_tokens=0, mamba_num=1))
    second = core.ask([*first, *prompt("another end", 50)], 16)
    assert len(reply) == 70
    core.settle()
    return Parted(second, core.tree.stats())


def stormy(model: str, seed: int, evicts: bool, *flags: str) -> tuple[list[list[int]], Any]:
    """Random conversations, up to three requests at once, which begin anew, go on, or branch from
    each other. evicts: and things leave the device between them. Returns all replies, and what was
    counted."""
    core, rng = engine(model, *flags), random.Random(seed)
    talks: list[list[int]] = []
    found: list[list[int]] = []

    def leave() -> None:
        tree = core.tree
        ways: list[Callable[[], Any]] = [
            core.evict,
            lambda: tree.evict(EvictParams(num_tokens=rng_of_ways.randrange(1, 400))),
            lambda: tree.evict(EvictParams(num_tokens=0, mamba_num=rng_of_ways.randrange(1, 5))),
            core.tree.tiers.drain,
        ]
        rng_of_ways.choice(ways)()

    rng_of_ways = random.Random(seed)
    for _ in range(8):
        asked = []
        for _ in range(rng.randint(1, 3)):
            before = list(rng.choice(talks)) if talks and rng.random() < 0.7 else []
            if before and rng.random() < 0.4:
                del before[rng.randrange(len(before)) :]
            del before[300:]
            own = [rng.randrange(3, 900) for _ in range(rng.randint(1, 150))]
            asked.append(([*before, *own], rng.randint(1, 40)))
        rids = [core.submit(tokens, new) for tokens, new in asked]
        core.run()
        for rid, (tokens, _) in zip(rids, asked, strict=True):
            found.append(core.reply(rid).tokens)
            talks.append([*tokens, *found[-1]])
        if evicts:
            for _ in range(rng_of_ways.randint(0, 2)):
                leave()
    if evicts:
        core.settle()
    return found, core.tree.stats() if evicts else {}


class Room(NamedTuple):
    """The replies of a request that makes room for one of a higher priority, and leaves the device
    then, and of that one: each undisturbed, then both. again: tokens of the first that were
    computed twice. stats: behind them."""

    alone: list[list[int]]
    both: list[list[int]]
    retractions: int
    again: int
    stats: dict[str, Any]


def makes_room(model: str, *flags: str) -> Room:
    prompts = prompt("low", 100), prompt("high", 90)
    one = "--max-running-requests", "1", "--enable-priority-scheduling"
    core = engine(model, *one, *flags)
    alone = [core.ask(tokens, 60, "alone").tokens for tokens in prompts]
    computed, rids = retractions.Computed(core), [core.submit(prompts[0], 60)]
    core.inbox[-1].priority = 0

    def leave() -> None:
        core.tree.tiers.drain()
        core.evict()

    left = When(lambda: any(r.retraction_count for r in core.scheduler.waiting_queue), leave)

    def each_pass(number: int) -> None:
        left(number)
        if number == 40:
            rids.append(core.submit(prompts[1], 60))
            core.inbox[-1].priority = 100

    core.run(each_pass=each_pass)
    core.settle()
    retracted = core.requests[rids[0]].retraction_count
    both = [core.reply(rid).tokens for rid in rids]
    return Room(alone, both, retracted, computed.again, core.tree.stats())
