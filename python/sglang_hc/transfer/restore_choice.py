"""What to do with one request's stored state, decided at admission and counted.

The decision is `policy.restore_plan`'s; here is what it needs to know of now: how long the copies
that were promised before will keep the link busy. Belongs to the scheduler thread, costs
microseconds, and never waits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy import order
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.fetches import UnknownCosts
from sglang_hc.policy.restore_plan import LONG_HISTORY, Decision, RestorePlan, Span, plan_restore

NOT_MEASURED = "not_measured"
"""Reason to load everything: there is no cost model."""


class Choice(NamedTuple):
    """Restore the first `tokens` stored tokens, layers below `recompute` by recomputing them.

    decision, reason: what is counted. copy_seconds: for which the link is busy with it.
    """

    tokens: int
    recompute: int
    decision: str
    reason: str
    copy_seconds: float = 0.0


class RestoreChoice:
    """Decides for one model on one machine. Tells the look at the queue what fetching costs
    (`policy.fetches.RestoreCosts`).

    cost: None when the machine could not be measured; then everything that is stored is restored.
    can_recompute: whether the model's first layers can be run on their own.
    counters: gets `restore_decision_*` and `restore_reason_*`.
    """

    def __init__(
        self,
        cost: CostModel | None,
        plan: LayerPlan,
        can_recompute: bool,
        counters: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cost = cost
        self._plan = plan
        self._can_recompute = can_recompute
        self._counters = counters
        self._clock = clock
        self._link_free = 0.0

    @property
    def backlog(self) -> float:
        """Seconds for which the link is busy with what was promised before, as modelled."""
        return max(0.0, self._link_free - self._clock())

    def choose(self, spans: Sequence[Span], context: int, new: int) -> Choice:
        """How to bring `spans` back behind `context` tokens that the device has, before `new` ones.

        Changes nothing: `take` the choice, or `refuse` with its reason.
        """
        if self._cost is None:
            total = sum(span.tokens for span in spans)
            return Choice(total, self._plan.recompute, Decision.LOAD.value, NOT_MEASURED)
        plan = self._planned(self._cost, spans, context, new)
        seconds = self._copy_seconds(self._cost, spans, plan)
        decision, reason = plan.decision.value, plan.reason.value
        return Choice(plan.tokens, plan.recompute_layers, decision, reason, seconds)

    def take(self, choice: Choice) -> None:
        """The choice is carried out: count it, and book the link."""
        self._link_free = max(self._link_free, self._clock()) + choice.copy_seconds
        self._count(choice.decision, choice.reason)

    def refuse(self, reason: str) -> None:
        """Nothing is restored."""
        self._count(Decision.REFUSE.value, reason)

    def kv_per_hidden(self, tokens: int) -> float:
        """For the order of copies of a pass over so many tokens; see `policy.order`."""
        return 0.0 if self._cost is None else order.kv_per_hidden(self._cost, tokens)

    @property
    def block_seconds(self) -> float:
        """Reading one block of many from disk; 0 when that is not known."""
        return BLOCK_TOKENS * self._token_seconds(SourceTier.DISK)

    @property
    def host_token_seconds(self) -> float:
        """Restoring one token of many from host memory."""
        return self._token_seconds(SourceTier.HOST) or UnknownCosts.host_token_seconds

    @property
    def disk_token_seconds(self) -> float:
        """Restoring one token of many from disk."""
        assumed = self.host_token_seconds * UnknownCosts.disk_token_seconds
        return self._token_seconds(SourceTier.DISK) or assumed

    def saved_seconds(self, host: int, fetched: int, context: int, new: int) -> float:
        """By how much sooner a request starts with `fetched` more tokens in host memory, behind
        `host` ones there and `context` ones on the device; infinite when nothing is measured.

        Negative when they would not be restored even then. A fetch is waited for no longer than
        this: then waiting in vain costs no more than recomputing does.
        """
        if self._cost is None:
            return math.inf
        known = [Span(SourceTier.HOST, host)] if host else []
        spans = [*known, Span(SourceTier.HOST, fetched)]
        arrived = self._planned(self._cost, spans, context, new)
        seconds = arrived.seconds if arrived.tokens > host else arrived.as_stored_seconds
        return self._planned(self._cost, known, context, fetched + new).seconds - seconds

    def _planned(
        self, cost: CostModel, spans: Sequence[Span], context: int, new: int
    ) -> RestorePlan:
        return plan_restore(
            cost,
            self._plan,
            spans,
            context=context,
            new=new,
            backlog=self.backlog,
            allow_recompute=self._can_recompute,
        )

    def _copy_seconds(self, cost: CostModel, spans: Sequence[Span], plan: RestorePlan) -> float:
        stored = self._plan
        kv = min(stored.kv, stored.num_layers - plan.recompute_layers)
        hidden = stored.num_layers - plan.recompute_layers - kv
        seconds, left = 0.0, plan.tokens
        for span in spans:
            tokens = min(span.tokens, left)
            left -= tokens
            if tokens and hidden:
                seconds += hidden * cost.copy_hidden(span.tier, tokens)
            if tokens and kv:
                seconds += kv * cost.copy_kv(span.tier, tokens)
        return seconds

    def _token_seconds(self, tier: SourceTier) -> float:
        """Copies of all stored layers, over a history long enough to hide what a copy costs at
        least; 0 when it is not known."""
        cost, stored = self._cost, self._plan
        if cost is None or tier not in cost.copies:
            return 0.0
        seconds = stored.kv * cost.copy_kv(tier, LONG_HISTORY)
        if stored.hidden:
            seconds += stored.hidden * cost.copy_hidden(tier, LONG_HISTORY)
        return seconds / LONG_HISTORY

    def _count(self, decision: str, reason: str) -> None:
        self._counters[f"restore_decision_{decision}"] += 1
        self._counters[f"restore_reason_{reason}"] += 1
