"""How one restoration runs: what is loaded, what is recomputed although stored, or refused.

The state was saved under one layer plan, for some usual history. This history may be short or the
link busy, and then recomputing more is cheaper. Only a prefix of the layers can be recomputed,
because that runs the model's own first layers.

Candidates, all timed by `makespan` to the moment the new tokens are through the last layer:

- load the history, recomputing layers 0..r-1 of it for every possible r;
- refuse: run everything from its tokens.

A part of the history is no candidate: recomputing a prefix of layers balances the two resources as
well, and for less attention work than the last tokens of a history cost.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import ge, lt

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import LONG_HISTORY, CostModel, SourceTier
from sglang_hc.policy.makespan import LayerTimes, work_and_chain


class Choice(enum.Enum):
    """What is done with the stored state; those that load more come first."""

    LOAD = "load"
    """Every stored layer is loaded."""
    RECOMPUTE_MORE = "recompute_more"
    """Some stored layers are recomputed, the others are loaded."""
    REFUSE = "refuse"
    """Nothing is loaded; the history is run like new tokens."""
    TRY = "try"
    """Something that the costs refuse is loaded, to see how long it takes (`policy.tries`)."""


class Reason(enum.Enum):
    """Why; counted as a metric. The first circumstance without which more would be loaded."""

    AS_STORED = "as_stored"
    """No restriction: everything stored is loaded."""
    SLOW_TIER = "slow_tier"
    """A part was below host memory, and the front was computed meanwhile (`policy.meeting`)."""
    SHORT_HISTORY = "short_history"
    """The history is shorter than LONG_HISTORY."""
    FAST_COMPUTE = "fast_compute"
    """None of these: recomputing is faster on this machine."""
    NOTHING_STORED = "nothing_stored"
    """There is nothing to restore, or its layers are all RECOMPUTE."""
    NOT_MEASURED = "not_measured"
    """There is no cost model: everything is loaded."""
    ALWAYS = "always"
    """The user wants everything loaded (`--hc-restore always`)."""
    BLOCKS_GONE = "blocks_gone"
    """The blocks have left host memory since they were matched."""
    NO_DEVICE_SLOTS = "no_device_slots"
    """The device has no room for what would be restored."""
    TREE_CHANGED = "tree_changed"
    """The device has got another continuation of the prefix since it was matched."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What is done for one host match, and why.

    tokens: how many tokens are restored: all, or 0 when refused; for a try perhaps a part.
    recompute_layers: layers 0..n-1 of them are recomputed, the others loaded.
    seconds: expected, from now until the new tokens are through the last layer, by the costs alone;
    0 where nothing was weighed.
    as_stored_seconds: the same when every stored layer is loaded.
    copy_seconds: time that the link needs; what `plan_restore` returns has none yet.
    skips_hidden: some layers are stored in HIDDEN form, but by the costs none of them is loaded.
    rest: (tokens, context) of what runs behind it in the same pass; nothing where that was not
    weighed.
    """

    choice: Choice
    reason: Reason
    tokens: int
    recompute_layers: int
    seconds: float = 0.0
    as_stored_seconds: float = 0.0
    copy_seconds: float = 0.0
    skips_hidden: bool = False
    rest: tuple[int, int] = (0, 0)


def plan_restore(
    cost: CostModel,
    stored: LayerPlan,
    tokens: int,
    *,
    context: int,
    new: int,
    first: float = 0.0,
    allow_recompute: bool = True,
) -> RestorePlan:
    """The fastest way to bring back `tokens` in host memory and run `new` tokens behind them.

    context: tokens before them that are on the device already.
    first: seconds of other copies that come with it, and before it.
    allow_recompute: False where the server cannot recompute layers that are stored.
    Never slower, in modelled time, than loading all that is stored or recomputing everything.
    """
    fastest = partial(_fastest, cost, stored, context, new, allow_recompute)
    plan = replace(fastest(tokens, first), rest=(new, context + tokens))
    if plan.choice is Choice.LOAD or plan.reason is Reason.NOTHING_STORED:
        return plan
    return replace(plan, reason=_why(fastest, tokens, first, plan.choice))


def _fastest(
    cost: CostModel,
    stored: LayerPlan,
    context: int,
    new: int,
    allow_recompute: bool,
    tokens: int,
    first: float,
) -> RestorePlan:
    """The fastest candidate. Reasons other than AS_STORED and NOTHING_STORED are not looked for."""
    refused = stored.num_layers * cost.prefill_layer(tokens + new, context)
    if tokens == 0 or stored.recompute == stored.num_layers:
        return RestorePlan(Choice.REFUSE, Reason.NOTHING_STORED, 0, 0, refused, refused)
    times = cost.layer_times(SourceTier.HOST, tokens, context=context, new=new, start=first)
    loaded = max(work_and_chain(times, stored.recompute, stored.hidden, stored.kv))
    seconds, layers = loaded, stored.recompute
    if allow_recompute:
        seconds, layers = best_prefix(times, stored)
    if seconds >= refused:  # on a tie nothing is loaded: that keeps the link free
        return RestorePlan(Choice.REFUSE, Reason.AS_STORED, 0, 0, refused, loaded)
    choice = Choice.RECOMPUTE_MORE if layers > stored.recompute else Choice.LOAD
    return RestorePlan(choice, Reason.AS_STORED, tokens, layers, seconds, loaded)


def best_prefix(times: LayerTimes, stored: LayerPlan) -> tuple[float, int]:
    """(seconds, r): the best number r of first layers to recompute, some layer still loaded.

    `stored` must have a loaded layer.
    """
    layers, hidden_end = stored.num_layers, stored.recompute + stored.hidden

    def ends(times: LayerTimes, r: int) -> tuple[float, float]:
        return work_and_chain(times, r, max(0, hidden_end - r), min(stored.kv, layers - r))

    found = range(stored.recompute, layers)
    if times.overlap and not times.weights:
        # While staging holds all copies, each recomputed layer adds work and makes no chain that
        # begins in a copy longer (its weights' own copy would), so the best r is where both cross,
        # or the one before. Where recomputing a layer is cheaper than projecting it, work falls as
        # well, up to the last HIDDEN layer.
        unbounded = times._replace(ahead=math.inf)
        falls = times.recompute < times.project
        first = low = high = min(hidden_end, layers - 1) if falls else stored.recompute
        while high < layers - 1 and lt(*ends(unbounded, high)):  # the best r is mostly near
            low, high = high + 1, min(2 * high - first + 1, layers - 1)
        crossing = bisect_left(range(high), True, lo=low, key=lambda r: ge(*ends(unbounded, r)))
        if crossing * (times.recompute + times.new) - times.ahead <= times.start:
            found = range(max(first, crossing - 1), crossing + 1)
    return min((max(ends(times, r)), r) for r in found)


def _why(
    fastest: Callable[[int, float], RestorePlan], tokens: int, first: float, choice: Choice
) -> Reason:
    """The first circumstance whose removal makes more of what is stored worth loading."""
    order = tuple(Choice)
    if tokens < LONG_HISTORY:
        longer = fastest(LONG_HISTORY, first)
        if order.index(longer.choice) < order.index(choice):
            return Reason.SHORT_HISTORY
    return Reason.FAST_COMPUTE
