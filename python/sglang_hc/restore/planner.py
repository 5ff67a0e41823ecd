"""What to do with one request's stored state, decided at admission and counted.

`policy.restore_plan` decides, by costs that correct themselves (`policy.cost_correction`). This
module knows the present state that the decision needs: for how long the copies of earlier
restorations keep the link busy. Now and then it tries what the costs always refuse
(`policy.tries`). Belongs to the scheduler thread, takes microseconds, and never waits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy import copy_order
from sglang_hc.policy.cost_correction import CorrectedCosts
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.meeting import History, Split, best_split
from sglang_hc.policy.restore_plan import LONG_HISTORY, Decision, Reason, RestorePlan, plan_restore
from sglang_hc.policy.tries import TRY_SHARE, Tries, affordable
from sglang_hc.queue.fetches import FAR_SECONDS

NOT_MEASURED = "not_measured"
"""Reason to load everything: there is no cost model."""
ALWAYS = "always"
"""Reason to load everything: the user wants it (`--hc-restore always`)."""
TRY = "try"
"""Decision to load something that the costs refuse, to see how long it takes."""

_UNLEARNABLE = frozenset({Reason.AS_STORED, Reason.BUSY_LINK, Reason.NOTHING_STORED})
"""A refusal for one of these reasons says nothing about the costs, or ends by itself."""
_LEARNABLE = frozenset(reason.value for reason in set(Reason) - _UNLEARNABLE)


class Choice(NamedTuple):
    """Restore the first `tokens` stored tokens, and recompute their layers below `recompute`.

    decision, reason: what is counted. copy_seconds: time that the link needs for it. skipped: some
    layers are stored in HIDDEN form, but the costs would load none of them.
    """

    tokens: int
    recompute: int
    decision: str
    reason: str
    copy_seconds: float = 0.0
    skipped: bool = False


class RestorePlanner:
    """Decides for one model on one machine. Also tells the waiting queue what fetching costs
    (`queue.fetches.RestoreCosts`).

    costs: None if the machine could not be measured; then everything that is stored is restored.
    always: restore everything, whatever it costs.
    plan: of the whole model; ranks that have some of its layers each decide alike.
    can_recompute: whether layers that are stored can be recomputed instead.
    counters: gets `restore_decision_*` and `restore_reason_*`.
    """

    def __init__(
        self,
        costs: CorrectedCosts | None,
        plan: LayerPlan,
        can_recompute: bool,
        counters: Counter[str],
        clock: Callable[[], float] = time.monotonic,
        *,
        always: bool = False,
        as_they_come: bool = True,
    ) -> None:
        """See the class. as_they_come: blocks may be restored before all of a history is here."""
        self.costs = costs
        self._always = always
        self._restore_tries = Tries()
        self._hidden_tries = Tries()
        self._fetch_tries = Tries()
        self.plan = plan
        self._can_recompute = can_recompute
        self._as_they_come = as_they_come
        self._counters = counters
        self._clock = clock
        self._link_free = 0.0

    @property
    def backlog(self) -> float:
        """Seconds, as modelled, for which the link is busy with earlier restorations."""
        return max(0.0, self._link_free - self._clock())

    def choose(self, tokens: int, context: int, new: int) -> Choice:
        """How to bring back `tokens` in host memory, which lie behind `context` tokens on the
        device and before `new` tokens.

        Changes nothing. Call `take` with the choice, or `refuse` with its reason.
        """
        cost = self._weighed
        if cost is None:
            reason = ALWAYS if self._always else NOT_MEASURED
            return Choice(tokens, self.plan.recompute, Decision.LOAD.value, reason)
        plan = self._planned(cost, tokens, context, new)
        skipped = self._skips_hidden(plan)
        tries = self._hidden_tries if skipped else self._restore_tries
        if (not plan.tokens or skipped) and plan.reason not in _UNLEARNABLE:
            tries.follow(self._changes)
            tried = 0
            if tries.due:
                tried = affordable(
                    cost, self.plan, tokens, context=context, new=new, seconds=plan.seconds
                )
            if tried:
                copies = self._copy_seconds(cost, tried, self.plan.recompute)
                reason = plan.reason.value
                return Choice(tried, self.plan.recompute, TRY, reason, copies, skipped)
        seconds = self._copy_seconds(cost, plan.tokens, plan.recompute_layers)
        decision, reason = plan.decision.value, plan.reason.value
        return Choice(plan.tokens, plan.recompute_layers, decision, reason, seconds, skipped)

    def as_stored(self, tokens: int) -> Choice:
        """Restore what a history that was met has left to restore, without weighing it."""
        decision, reason = Decision.LOAD.value, Reason.AS_STORED.value
        return Choice(tokens, self.plan.recompute, decision, reason)

    def take(self, choice: Choice) -> None:
        """The choice is carried out: count it, and add its copies to the backlog."""
        self._link_free = max(self._link_free, self._clock()) + choice.copy_seconds
        tries = self._hidden_tries if choice.skipped else self._restore_tries
        if choice.decision == TRY:
            tries.tried()
        elif choice.skipped:
            tries.refused()
        self._count(choice.decision, choice.reason)

    def refuse(self, reason: str) -> None:
        """Count that nothing is restored."""
        if reason in _LEARNABLE:
            self._restore_tries.refused()
        self._count(Decision.REFUSE.value, reason)

    def kv_per_hidden(self, tokens: int) -> float:
        """KV layers between two HIDDEN layers in the order of copies; see `policy.copy_order`."""
        return 0.0 if self.costs is None else copy_order.kv_per_hidden(self.costs.model, tokens)

    def block_read_seconds(self, tier: SourceTier) -> float:
        """Seconds to read one block of many into host memory; 0 when that is not known."""
        return BLOCK_TOKENS * self._copy_token(tier)

    def block_seconds(self, tier: SourceTier) -> float:
        """`block_read_seconds` as far as it is weighed: 0 where everything is restored, and for a
        block that host memory has elsewhere."""
        weighed = tier is not SourceTier.HOST and not self._always
        return self.block_read_seconds(tier) if weighed else 0.0

    def token_seconds(self, tier: SourceTier) -> float:
        """Seconds to restore one token of many from a tier."""
        host = self._copy_token(SourceTier.HOST) or 1.0
        if tier is SourceTier.HOST:
            return host
        read = self._copy_token(tier)
        return read + host if read else FAR_SECONDS * host

    def split(self, history: History, decoding: int, early_from: int | None) -> Split | None:
        """Where a history that comes from below should meet the part of it that is computed; None
        when the costs of that are not known or not weighed."""
        cost = self._weighed
        if cost is None or any(span.tier not in cost.copies for span in history.coming):
            return None
        # A pass that waits in vain recomputes.
        by_layers = history.by_layers and self._can_recompute
        return best_split(
            cost,
            self.plan,
            history._replace(by_layers=by_layers),
            decoding=decoding,
            can_recompute=self._can_recompute,
            early_from=early_from if self._as_they_come else None,
        )

    def prefill_seconds(self, new: int, context: int) -> float:
        """Seconds to compute `new` tokens behind `context` tokens; 0 when that is not known."""
        if self.costs is None:
            return 0.0
        return self.plan.num_layers * self.costs.model.prefill_layer(new, context)

    def saved_seconds(self, host: int, fetched: int, context: int, new: int) -> float:
        """Seconds by which a request starts sooner with `fetched` more tokens in host memory,
        behind `host` tokens there and `context` tokens on the device; infinite when nothing is
        measured.

        Negative when the tokens would not be restored even then. A request waits for a fetch no
        longer than this, so waiting in vain costs no more than recomputing does.
        """
        cost = self._weighed
        if cost is None:
            return math.inf
        arrived = self._planned(cost, host + fetched, context, new)
        seconds = arrived.seconds if arrived.tokens else arrived.as_stored_seconds
        return self._planned(cost, host, context, fetched + new).seconds - seconds

    @property
    def tries(self) -> Tries | None:
        """When a fetch that is not worth it is made as a try; None for never."""
        if self._weighed is None:
            return None
        self._fetch_tries.follow(self._changes)
        return self._fetch_tries

    def try_seconds(self, context: int, new: int) -> float:
        """Longest seconds that a request with `new` tokens to compute waits for such a fetch."""
        cost = self._weighed
        if cost is None:
            return 0.0
        return TRY_SHARE * self.prefill_seconds(new, context)

    @property
    def _weighed(self) -> CostModel | None:
        """The costs that decide; None when everything is restored."""
        return None if self.costs is None or self._always else self.costs.model

    @property
    def _changes(self) -> int:
        return 0 if self.costs is None else self.costs.changes

    def _skips_hidden(self, plan: RestorePlan) -> bool:
        """Whether the plan loads something, but none of the stored HIDDEN layers."""
        stored = self.plan
        return bool(plan.tokens and stored.hidden) and (
            plan.recompute_layers >= stored.recompute + stored.hidden
        )

    def _planned(self, cost: CostModel, tokens: int, context: int, new: int) -> RestorePlan:
        return plan_restore(
            cost,
            self.plan,
            tokens,
            context=context,
            new=new,
            backlog=self.backlog,
            allow_recompute=self._can_recompute,
        )

    def _copy_seconds(self, cost: CostModel, tokens: int, recompute: int) -> float:
        """Seconds to copy the layers from `recompute` on of so many tokens."""
        if not tokens:
            return 0.0
        stored = self.plan
        kv = min(stored.kv, stored.num_layers - recompute)
        loaded = LayerPlan(recompute, stored.num_layers - recompute - kv, kv)
        return cost.copy_stored(SourceTier.HOST, loaded, tokens)

    def _copy_token(self, tier: SourceTier) -> float:
        """Seconds to copy all stored layers of one token, in a history so long that the fixed cost
        of a copy does not show; 0 when it is not known."""
        if self.costs is None or tier not in self.costs.model.copies:
            return 0.0
        return self.costs.model.copy_stored(tier, self.plan, LONG_HISTORY) / LONG_HISTORY

    def _count(self, decision: str, reason: str) -> None:
        self._counters[f"restore_decision_{decision}"] += 1
        self._counters[f"restore_reason_{reason}"] += 1
