"""Learned pauses on SGLang's scheduler: who is about to come back stays in host memory."""

from __future__ import annotations

import itertools
from heapq import heappop, heappush
from typing import Any

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.pauses import EVIDENCE, Kind, Pauses
from sglang_hc.tools.workloads.agents import agents
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.clock import Clock
from support.core import Core, run_in_child
from support.prompts import SMALL, prompt

PROMPTS = {name: prompt(name, 260) for name in ("build", "read")}


def teach(pauses: Pauses, clock: Clock) -> None:
    """Files are read in a tenth of a second, or never, and builds take 100 s."""
    for number in range(EVIDENCE):
        for tool, seconds in (("read", 0.1), ("build", 100.0)):
            pauses.left(Kind(None, tool, 1), [number.to_bytes(16, "big")], clock.now)
            clock.pass_time(seconds)
            pauses.advance(clock.now)
            pauses.came([number.to_bytes(16, "big")], clock.now)
        pauses.left(Kind(None, "read", 1), [(1000 + number).to_bytes(16, "big")], clock.now)


def two_sessions(eviction: str) -> dict[str, int]:
    """A build has begun, a file was read 50 s later, and 40 s later others need room. Returns how
    many tokens of both host memory has then."""
    from sglang_hc.srt.tree import capturing_tree

    core = Core(*SMALL, "--hc-forms", "kv", "--hc-host-size-gb", "0.01", "--hc-eviction", eviction)
    clock, away, names = Clock(), core.tree.tiers.away, {}
    if away is not None:
        away.clock = clock
        teach(away.pauses, clock)
        capturing_tree.called_by = lambda req: names.get(req.rid, "")
    histories = {}
    for name, said in PROMPTS.items():
        rid = core.submit(said, 4)
        names[rid] = name
        core.run()
        histories[name] = said + core.reply(rid).tokens
        core.settle()
        clock.pass_time(50)
    clock.pass_time(-10)
    host, number = core.tree.tiers.host, 0
    while host.free_slots > 3:
        core.ask(prompt(number, 3 * BLOCK_TOKENS + 1), 1)
        core.settle()
        number += 1
    assert host.evicted_blocks == 0
    core.ask(prompt("last", 6 * BLOCK_TOKENS + 1), 1)
    core.settle()
    return {
        name: host.tree.match(Prefix(None, pack_tokens(history))).tokens
        for name, history in histories.items()
    }


@pytest.mark.parametrize(("eviction", "stays"), [("queue", "read"), ("learned", "build")])
def test_who_is_about_to_come_back_stays(models: None, eviction: str, stays: str) -> None:
    found = run_in_child(two_sessions, eviction)
    other = {"read": "build", "build": "read"}[stays]
    assert found[stays] >= 256 > found[other], found


SHORTER = 4
"""Texts of the load are so many times shorter than those of the simulator."""

LONGEST = 1200
"""Tokens of a conversation, behind which it is over."""


def hits_of_agents(eviction: str, pin_s: float) -> float:
    """Agents that call tools, each answered at once; time is theirs. pin_s: every answer is pinned
    for so long; 0 for none. Returns the share of the prompts' tokens that were not computed."""
    from sglang_hc.srt.tree import capturing_tree

    size = "--hc-host-size-gb", "0.0075", "--max-total-tokens", "1300"
    flags = "--dtype", "float32", "--hc-forms", "kv", "--hc-eviction", eviction
    core = Core(*flags, *size, model="llama-gqa")
    clock, tiers, names = Clock(0.0), core.tree.tiers, dict[str, str]()
    tiers.retention._clock = clock
    if tiers.away is not None:
        tiers.away.clock = clock
    capturing_tree.called_by = lambda req: names[req.rid]  # type: ignore[assignment]
    load, numbers = agents(sessions=24, rate=0.1), itertools.count()
    due: list[tuple[float, int, Any, int, list[int]]] = []
    for session in load.sessions:
        heappush(due, (session.arrival, next(numbers), session, 0, []))
    asked = cached = 0
    while due:
        at, number, session, turn, history = heappop(due)
        clock.now, one = at, session.turns[turn]
        for span in one.said:
            history += prompt(span.start, -(-span.length // SHORTER))
        pin = {"session": f"s{number}", "ttl_s": pin_s}
        new = -(-one.answer.length // SHORTER)
        rid = core.submit(history, new, custom_params={"hc_pin": pin} if pin_s else None)
        names[rid] = one.calls
        core.run()
        tiers.drain()
        reply = core.reply(rid)
        asked, cached = asked + len(history), cached + reply.cached
        history += reply.tokens
        if turn + 1 < len(session.turns) and len(history) < LONGEST:
            later = at + session.turns[turn + 1].think
            heappush(due, (later, number, session, turn + 1, history))
    return cached / asked


@pytest.mark.slow
def test_of_tool_calls_more_is_hit_than_by_age_and_than_by_fixed_times(models: None) -> None:
    """As in the simulator, on its load made shorter: tokens in percent of the prompts'."""
    learned, queue, pinned = (
        100 * run_in_child(hits_of_agents, *arm)
        for arm in (("learned", 0.0), ("queue", 0.0), ("queue", 30.0))
    )
    assert learned > max(queue, pinned) + 0.5, (learned, queue, pinned)
