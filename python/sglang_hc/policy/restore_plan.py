"""How one restoration runs: what is loaded, what is recomputed although stored, or refused.

The state was saved under one layer plan, for some usual history. This history may be short, the
link busy or the tier slow, and then recomputing more is cheaper. Only a prefix of the layers can be
recomputed, because that runs the model's own first layers, and only a prefix of the tokens can be
restored, because a token's recomputation needs the state of all tokens before it.

Candidates, all timed by `pipeline` to the moment the new tokens are through the last layer:

- for each cut at the end of a span: load the tokens before the cut, recomputing layers 0..r-1 of
  them for every possible r, and run the tokens behind it together with the new ones;
- refuse: run everything from its tokens.

A cut inside a span is no candidate: recomputing a prefix of layers balances the two resources as
well, and for less attention work than the last tokens of a history cost.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.makespan import LayerTimes, paths

LONG_HISTORY = 16384
"""Tokens of the history that tells SHORT_HISTORY from FAST_COMPUTE (the paper's longest)."""


class Decision(enum.Enum):
    """What is done with the stored state."""

    LOAD = "load"
    """All tokens are restored and every stored layer is loaded."""
    RECOMPUTE_MORE = "recompute_more"
    """All tokens are restored, but some stored layers are recomputed."""
    SHORTEN = "shorten"
    """Only a prefix of the tokens is restored."""
    REFUSE = "refuse"
    """Nothing is loaded; the history is run like new tokens."""


class Reason(enum.Enum):
    """Why; counted as a metric. The first circumstance without which more would be loaded."""

    AS_STORED = "as_stored"
    """None: loading all that is stored is the fastest."""
    BUSY_LINK = "busy_link"
    """The link or the sources have other work first."""
    SLOW_TIER = "slow_tier"
    """Not everything is in host memory."""
    SHORT_HISTORY = "short_history"
    """The history is shorter than LONG_HISTORY."""
    FAST_COMPUTE = "fast_compute"
    """None of these: recomputing is faster on this machine."""
    NOTHING_STORED = "nothing_stored"
    """There is no span to restore, or its layers are all RECOMPUTE."""


_SHORT_OF_LOADING = {
    Decision.LOAD: 0,
    Decision.RECOMPUTE_MORE: 1,
    Decision.SHORTEN: 1,
    Decision.REFUSE: 2,
}


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive stored tokens of one tier, in path order. Those of a lower tier are read into
    host memory, one span after the other, before a restoration that takes them begins.

    wait: seconds until the tier can deliver them: a prefetch on its way, a disk's queue.
    """

    tier: SourceTier
    tokens: int
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """One decision.

    tokens: how many stored tokens are restored, from the first; 0 when refused.
    recompute_layers: layers 0..n-1 of them are recomputed, the others loaded.
    seconds: expected, from now until the new tokens are through the last layer.
    as_stored_seconds, refuse_seconds: the same for the two simplest alternatives.
    """

    decision: Decision
    reason: Reason
    tokens: int
    recompute_layers: int
    seconds: float
    as_stored_seconds: float
    refuse_seconds: float


def plan_restore(
    cost: CostModel,
    stored: LayerPlan,
    spans: Sequence[Span],
    *,
    context: int,
    new: int,
    backlog: float = 0.0,
    pieces: int = 1,
    allow_recompute: bool = True,
) -> RestorePlan:
    """The fastest way to bring `spans` back and run `new` tokens behind them.

    context: tokens before the first span that are on the device already.
    backlog: seconds of copies that the link has queued ahead of this restoration.
    pieces: see `LayerTimes`.
    allow_recompute: False where the server cannot recompute layers that are stored.
    Never slower, in modelled time, than loading all that is stored or recomputing everything.
    O(spans * log(layers)). Raises KeyError for a tier that `cost` does not know.
    """
    ask = _Question(cost, stored, context, new, pieces, allow_recompute)
    plan = _choose(ask, spans, backlog)
    if plan.decision is Decision.LOAD or plan.reason is Reason.NOTHING_STORED:
        return plan
    return replace(plan, reason=_why(ask, spans, backlog, plan.decision))


class _Question(NamedTuple):
    """What stays the same when a circumstance is thought away."""

    cost: CostModel
    stored: LayerPlan
    context: int
    new: int
    pieces: int
    allow_recompute: bool


def _choose(ask: _Question, spans: Sequence[Span], backlog: float) -> RestorePlan:
    """The fastest candidate. Reasons other than AS_STORED and NOTHING_STORED are not looked for."""
    cost, stored, context, new, pieces, allow_recompute = ask
    total = sum(span.tokens for span in spans)
    refused = stored.num_layers * cost.prefill_layer(total + new, context)
    if total == 0 or stored.recompute == stored.num_layers:
        reason = Reason.NOTHING_STORED
        return RestorePlan(Decision.REFUSE, reason, 0, 0, refused, refused, refused)
    best_seconds, best_tokens, best_layers = refused, 0, 0
    as_stored = refused
    tokens, copy_hidden, copy_kv, start, read = 0, 0.0, 0.0, backlog, 0.0
    for span in spans:
        tokens += span.tokens
        if span.tier is not SourceTier.HOST:
            read += cost.copy_stored(span.tier, stored, span.tokens)
        if stored.hidden:
            copy_hidden += cost.copy_hidden(SourceTier.HOST, span.tokens)
        copy_kv += cost.copy_kv(SourceTier.HOST, span.tokens)
        start = max(start, span.wait)
        times = LayerTimes(
            copy_hidden=copy_hidden,
            copy_kv=copy_kv,
            project=cost.project_kv(tokens) if stored.hidden else 0.0,
            recompute=cost.prefill_layer(tokens, context),
            new=cost.prefill_layer(total - tokens + new, context + tokens),
            start=start,
            pieces=pieces,
            overlap=cost.overlap,
            ahead=cost.ahead,
        )
        loaded = read + max(paths(times, stored.recompute, stored.hidden, stored.kv))
        seconds, layers = loaded, stored.recompute
        if allow_recompute:
            seconds, layers = best_prefix(times, stored)
            seconds += read
        # On a tie with recomputation nothing is loaded: that keeps the link free.
        if seconds < best_seconds or (seconds == best_seconds and best_tokens):
            best_seconds, best_tokens, best_layers = seconds, tokens, layers
        if tokens == total:
            as_stored = loaded
    if best_tokens == 0:
        decision = Decision.REFUSE
    elif best_tokens < total:
        decision = Decision.SHORTEN
    else:
        more = best_layers > stored.recompute
        decision = Decision.RECOMPUTE_MORE if more else Decision.LOAD
    return RestorePlan(
        decision, Reason.AS_STORED, best_tokens, best_layers, best_seconds, as_stored, refused
    )


def best_prefix(times: LayerTimes, stored: LayerPlan) -> tuple[float, int]:
    """(seconds, r): the best number r of first layers to recompute, some layer still loaded.

    `stored` must have a loaded layer. Where the search without a bound on staging finds an r that
    does not reach the bound, it is the best with it; else every r is tried.
    """
    if times.overlap:
        seconds, r = _unbounded_prefix(times, stored)
        if r * (times.recompute + times.new) - times.ahead <= times.start:
            return seconds, r
    layers = stored.num_layers
    hidden_end = layers - stored.kv
    best_seconds, best = math.inf, stored.recompute
    for r in range(stored.recompute, layers):
        ends = paths(times, r, max(0, hidden_end - r), min(stored.kv, layers - r))
        if max(ends) < best_seconds:
            best_seconds, best = max(ends), r
    return best_seconds, best


def _unbounded_prefix(times: LayerTimes, stored: LayerPlan) -> tuple[float, int]:
    """`best_prefix` with staging that holds everything.

    With more layers recomputed the compute work grows and no
    chain that begins in a copy does, so the minimum is where they cross, and is bisected for. Where
    recomputing a layer is cheaper than projecting it, work falls too, and the search begins behind
    the HIDDEN layers.
    """
    layers = stored.num_layers
    kv = stored.kv
    hidden_end = layers - kv
    times = times._replace(ahead=math.inf)
    low = stored.recompute if times.recompute >= times.project else min(hidden_end, layers - 1)
    work, chain = paths(times, low, max(0, hidden_end - low), min(kv, layers - low))
    if work >= chain:
        return work, low
    # From here on `below` waits for copies and `above` does not, unless it is the last r there is.
    below, below_seconds, above, above_seconds = low, chain, layers - 1, math.inf
    step, bracketed = 1, False
    while above - below > 1 or above_seconds == math.inf:
        # What is stored fits most restorations, so begin near it and gallop before bisecting.
        middle = (below + above) // 2 if bracketed else min(below + step, above)
        if middle == below:
            break
        work, chain = paths(times, middle, max(0, hidden_end - middle), min(kv, layers - middle))
        if work >= chain or middle == above:
            above, above_seconds, bracketed = middle, max(work, chain), True
        else:
            below, below_seconds, step = middle, chain, 2 * step
    return (below_seconds, below) if below_seconds <= above_seconds else (above_seconds, above)


def _why(ask: _Question, spans: Sequence[Span], backlog: float, decision: Decision) -> Reason:
    """The first circumstance whose removal makes more of what is stored worth loading."""

    def more_loaded(others: Sequence[Span]) -> bool:
        other = _choose(ask, others, 0.0).decision
        return _SHORT_OF_LOADING[other] < _SHORT_OF_LOADING[decision]

    busy = backlog > 0 or any(span.wait > 0 for span in spans)
    if busy and more_loaded([Span(span.tier, span.tokens) for span in spans]):
        return Reason.BUSY_LINK
    total = sum(span.tokens for span in spans)
    far = any(span.tier is not SourceTier.HOST for span in spans)
    if far and SourceTier.HOST in ask.cost.copies and more_loaded([Span(SourceTier.HOST, total)]):
        return Reason.SLOW_TIER
    if total < LONG_HISTORY and more_loaded([Span(spans[-1].tier, LONG_HISTORY)]):
        return Reason.SHORT_HISTORY
    return Reason.FAST_COMPUTE
