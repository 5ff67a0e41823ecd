"""Agents that call tools: many turns, long inputs, short answers, pauses as long as the tool takes.

Assumed, all of it; no public trace has the names of tools with the times they took. What is known
of agents that write programs (43 turns in the median, 142K tokens in, 444 out) is kept in the
number of turns; lengths are about a sixteenth, so that a run takes seconds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from sglang_hc.tools.workloads.sessions import (
    FreshIds,
    Session,
    Span,
    Turn,
    Workload,
    poisson_arrivals,
)


@dataclass(frozen=True)
class Tool:
    """seconds: median of the time until its result comes, log-normal with this `spread` (standard
    deviation of the logarithm). tokens: of its result, in the mean. lost: share of calls after
    which the session never comes back."""

    seconds: float
    spread: float
    tokens: float
    lost: float = 0.005


USER = ""
"""Nothing was called: the answer went to the user."""

TOOLS = {
    "read_file": Tool(0.03, 0.5, 225),
    "edit_file": Tool(0.05, 0.5, 30),
    "search": Tool(0.4, 0.6, 125),
    "run_tests": Tool(45.0, 0.6, 100),
    "build": Tool(150.0, 0.5, 60),
    "web_search": Tool(1.2, 0.5, 150),
    "fetch_page": Tool(5.0, 0.8, 300),
    "query": Tool(0.8, 1.0, 100),
    "wait_for_job": Tool(300.0, 0.4, 40),
    USER: Tool(90.0, 1.2, 20, lost=0.45),
}

KINDS: dict[str, dict[str, float]] = {
    "coding": {
        "read_file": 40,
        "edit_file": 25,
        "search": 15,
        "run_tests": 12,
        "build": 4,
        USER: 3,
    },
    "research": {"web_search": 30, "fetch_page": 50, "read_file": 10, USER: 3},
    "operations": {"query": 60, "read_file": 15, "wait_for_job": 15, USER: 3},
}
"""Which tools a session of a kind calls, by weight."""

HEAD_TOKENS = 500
"""Instructions and tools, the same in all sessions of a kind."""

TASK_TOKENS, ANSWER_TOKENS, LENGTH_SPREAD = 125.0, 28.0, 0.8
"""Means, and the standard deviation of the logarithm of all lengths."""

LOMAX_SHAPE, LOMAX_SECONDS, LONGEST_S = 1.0, 3.0, 3600.0
"""Pauses of the load without pattern: heavy-tailed, half of them above LOMAX_SECONDS. No pause of
either load is longer than LONGEST_S."""


def agents(
    seed: int = 0, sessions: int = 300, rate: float = 0.05, *, pattern: bool = True
) -> Workload:
    """Sessions arrive at random and are of each kind equally often.

    pattern: False for the control: the same tools are called, but every pause comes from one
    distribution, and every answer is the last one with the same chance, whatever was called.
    """
    rng = random.Random(seed)
    ids = FreshIds()
    heads = {kind: ids.span(HEAD_TOKENS) for kind in KINDS}
    arrivals = poisson_arrivals(rng, rate)
    made = []
    for _ in range(sessions):
        kind = rng.choice(list(KINDS))
        said: tuple[Span, ...] = (heads[kind], ids.span(_length(rng, TASK_TOKENS)))
        think, turns = 0.0, []
        while True:
            name = rng.choices(list(KINDS[kind]), list(KINDS[kind].values()))[0]
            answer = ids.span(_length(rng, ANSWER_TOKENS))
            turns.append(Turn(said, answer, think, calls=name))
            tool = TOOLS[name]
            lost = tool.lost if pattern else _mean_lost(kind)
            if rng.random() < lost:
                break
            said = (ids.span(_length(rng, tool.tokens)),)
            think = min(LONGEST_S, _pause(rng, tool if pattern else None))
        made.append(Session(next(arrivals), tuple(turns)))
    name = "agents" if pattern else "agents without pattern"
    return Workload(name, tuple(made), warmup_turns=sum(len(s.turns) for s in made) // 5)


def _mean_lost(kind: str) -> float:
    weights = KINDS[kind]
    return sum(weights[name] * TOOLS[name].lost for name in weights) / sum(weights.values())


def _length(rng: random.Random, mean: float) -> int:
    spread = LENGTH_SPREAD
    return max(1, round(mean * math.exp(rng.gauss(-(spread**2) / 2, spread))))


def _pause(rng: random.Random, tool: Tool | None) -> float:
    if tool is None:
        return LOMAX_SECONDS * (math.pow(1 - rng.random(), -1 / LOMAX_SHAPE) - 1)
    return tool.seconds * math.exp(rng.gauss(0.0, tool.spread))
