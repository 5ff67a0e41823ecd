"""Seeded workloads: who asks what, when, and which tokens are shared with whom.

The published data sets are not redistributed and in part not public. What a generator fits and what
it assumes is in its docstring; benchmark/simulator/README.md shows how much that matters.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import cycle, islice

from sglang_hc.tools.workloads.l_eval import TASKS
from sglang_hc.tools.workloads.sessions import (
    FreshIds,
    Session,
    Turn,
    Workload,
    poisson_arrivals,
)


@dataclass(frozen=True)
class ConversationShape:
    """Statistics of multi-turn conversations.

    multi_turn_share: sessions with two turns or more; they have 2 + a geometric number of turns.
    session_sigma, turn_sigma: standard deviations of the logarithm of a turn's length, common to a
    session and of its own. prompt_share: of a turn's tokens, what the user wrote.
    """

    mean_turns: float
    multi_turn_share: float
    tokens_per_turn: float
    session_sigma: float
    turn_sigma: float
    prompt_share: float


ATTENTIONSTORE_SHAPE = ConversationShape(
    mean_turns=5.75,
    multi_turn_share=0.73,
    tokens_per_turn=865.0,
    session_sigma=1.0,
    turn_sigma=0.6,
    prompt_share=0.3,
)
"""ShareGPT as AttentionStore describes it (sections 2.3, 2.4, 4.2).

Stated: 5.75 turns in the mean, 73 % multi-turn, 47 % of sessions above 2K tokens, 30 % above 4K.
Fitted to the two shares: tokens_per_turn and session_sigma. Assumed: geometric turns, lognormal
lengths, turn_sigma, and prompt_share (the paper gives no split; HCache's ShareGPT4 has 0.16).
"""


def conversations(
    shape: ConversationShape,
    *,
    sessions: int,
    rate: float,
    think: float,
    seed: int,
    name: str,
    warmup_turns: int = 0,
) -> Workload:
    """Independent conversations with Poisson arrivals; nothing is shared between sessions."""
    rng = random.Random(seed)
    ids = FreshIds()
    arrivals = poisson_arrivals(rng, rate)
    rest = (shape.mean_turns - (1 - shape.multi_turn_share)) / shape.multi_turn_share - 2
    stop = 1 / (1 + rest)
    made = []
    for _ in range(sessions):
        count = 1
        if rng.random() < shape.multi_turn_share:
            count = 2 + int(math.log(1.0 - rng.random()) / math.log(1.0 - stop))
        common = rng.gauss(-(shape.session_sigma**2) / 2, shape.session_sigma)
        turns = []
        for index in range(count):
            own = rng.gauss(-(shape.turn_sigma**2) / 2, shape.turn_sigma)
            tokens = max(2, round(shape.tokens_per_turn * math.exp(common + own)))
            asked = max(1, round(tokens * shape.prompt_share))
            spans = (ids.span(asked),)
            turns.append(Turn(spans, ids.span(tokens - asked), think if index else 0.0))
        made.append(Session(next(arrivals), tuple(turns)))
    return Workload(name, tuple(made), warmup_turns)


def shuffled(workload: Workload, rate: float, seed: int) -> Workload:
    """The same turns in random order, Poisson at `rate` turns per second.

    Every order of the turns that keeps each session's own order is equally likely. A turn whose
    predecessor is not answered at its time arrives when it is.
    """
    rng = random.Random(seed)
    slots = [i for i, session in enumerate(workload.sessions) for _ in session.turns]
    rng.shuffle(slots)
    times: list[list[float]] = [[] for _ in workload.sessions]
    for index, time in zip(slots, poisson_arrivals(rng, rate), strict=False):
        times[index].append(time)
    sessions = []
    for session, own in zip(workload.sessions, times, strict=True):
        turns = tuple(replace(t, at=at) for t, at in zip(session.turns, own, strict=True))
        sessions.append(replace(session, arrival=own[0] if own else 0.0, turns=turns))
    return replace(workload, sessions=tuple(sessions))


def attentionstore(
    seed: int = 0,
    sessions: int = 9000,
    rate: float = 1.0,
    think: float = 0.0,
    shape: ConversationShape = ATTENTIONSTORE_SHAPE,
) -> Workload:
    """AttentionStore section 4.1: 9K sessions at lambda = 1.0; the first 10K of 52K turns warm up.

    The paper does not say when the later turns of a session arrive. Assumed: `think` seconds after
    the answer before, at once by default. With fewer sessions the warm-up shrinks in proportion.
    """
    return conversations(
        shape,
        sessions=sessions,
        rate=rate,
        think=think,
        seed=seed,
        name="attentionstore",
        warmup_turns=round(10_000 * sessions / 9000),
    )


SHAREGPT4_SHAPE = ConversationShape(
    mean_turns=9.5,
    multi_turn_share=0.9,
    tokens_per_turn=66.8 + 358.8,
    session_sigma=0.5,
    turn_sigma=0.6,
    prompt_share=66.8 / (66.8 + 358.8),
)
"""ShareGPT4 as HCache describes it (section 2.3): 66.8 tokens in and 358.8 out per round.

Fitted: mean_turns, so that half of the conversations reach 2.5K tokens. Assumed: the spreads.
"""


def sharegpt4(
    seed: int = 0, sessions: int = 2000, rate: float = 0.5, think: float = 30.0
) -> Workload:
    """HCache section 6.1.1: Poisson sessions, 30 s between the rounds of one."""
    return conversations(
        SHAREGPT4_SHAPE,
        sessions=sessions,
        rate=rate,
        think=think,
        seed=seed,
        name="sharegpt4",
        warmup_turns=sessions // 2,
    )


def l_eval(
    seed: int = 0,
    sessions: int = 4000,
    rate: float = 0.5,
    *,
    alpha: float = 1.0,
    contexts: int = 200,
) -> Workload:
    """HCache section 6.4: long contexts drawn again and again with Zipf skewness `alpha`.

    Context lengths are lognormal (sigma 0.3, assumed) around the task's mean and capped at 15,000
    tokens, below the 16K to which the paper extends its models. Each session is one request.
    """
    rng = random.Random(seed)
    ids = FreshIds()
    documents = []
    for task in islice(cycle(TASKS.values()), contexts):
        length = min(15_000, max(64, round(task.context * rng.lognormvariate(-0.045, 0.3))))
        documents.append((task, ids.span(length)))
    rng.shuffle(documents)
    weights = [(rank + 1) ** -alpha for rank in range(contexts)]
    arrivals = poisson_arrivals(rng, rate)
    made = []
    for task, document in rng.choices(documents, weights, k=sessions):
        asked = max(1, round(rng.expovariate(1 / task.question)))
        answer = max(1, round(rng.expovariate(1 / task.answer)))
        turn = Turn((document, ids.span(asked)), ids.span(answer))
        made.append(Session(next(arrivals), (turn,), whole=True))
    return Workload("l-eval", tuple(made), sessions // 10)
