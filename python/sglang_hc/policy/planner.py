"""What to do with one request's stored state, decided at admission and counted.

`policy.restore_plan` decides, by costs that correct themselves (`policy.correction`), as if each
restoration were alone; when their pass begins, `policy.batch` decides which of them recompute more.
Now and then it tries what the costs always refuse (`policy.tries`). Belongs to the scheduler
thread, takes microseconds, and never waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy import copy_order
from sglang_hc.policy.batch import Load, shared
from sglang_hc.policy.cost_model import LONG_HISTORY, CostModel, SourceTier
from sglang_hc.policy.meeting import History, Split, best_split
from sglang_hc.policy.restore_plan import Choice, Reason, RestorePlan, plan_restore
from sglang_hc.policy.tries import TRY_SHARE, Tries, affordable

FAR_SECONDS = 8.0
"""A token from below host memory over one from host memory, where nothing is measured: a disk is
some ten times slower than the link."""

_LEARNABLE = frozenset({Reason.SLOW_TIER, Reason.SHORT_HISTORY, Reason.FAST_COMPUTE})
"""A refusal for one of these reasons may be wrong because the costs are."""


class RestorePlanner:
    """Decides for one model on one machine. Also tells the waiting queue what fetching costs.

    costs: None if the machine could not be measured; then everything that is stored is restored.
    always: above 0, everything is restored, whatever it costs. May change at any time.
    plan: of the whole model; ranks that have some of its layers each decide alike.
    can_recompute: whether layers that are stored can be recomputed instead.
    counters: gets `restore_decision_*` and `restore_reason_*`.
    """

    def __init__(
        self,
        costs: CostModel | None,
        plan: LayerPlan,
        can_recompute: bool,
        counters: Counter[str],
        *,
        always: int = 0,
        as_they_come: bool = True,
        end_tokens: float = 0.0,
    ) -> None:
        """See the class. as_they_come: blocks may be restored before all of a history is here.
        end_tokens: whatever is restored, as many bytes as those of so many tokens come with it
        (`forms.EndLayout`)."""
        self.costs = costs
        self.always = always
        self._restore_tries = Tries()
        self._hidden_tries = Tries()
        self._fetch_tries = Tries()
        self.plan = plan
        self._can_recompute = can_recompute
        self._as_they_come = as_they_come
        self._end_tokens = end_tokens
        self._counters = counters
        self._taken: list[RestorePlan] = []
        """For the pass that begins next."""

    @property
    def can_restore_early(self) -> bool:
        """Whether a block may be restored before all of its history is here. Recomputed layers need
        the K and V of everything before."""
        return self._as_they_come and not self.plan.recompute

    def choose(self, tokens: int, context: int, new: int) -> RestorePlan:
        """How to bring back `tokens` in host memory, which lie behind `context` tokens on the
        device and before `new` tokens.

        Changes nothing. Call `take` with the plan, or `refuse` with its reason.
        """
        cost = self._weighed
        if cost is None:
            return self._all_of(tokens, Reason.ALWAYS if self.always else Reason.NOT_MEASURED)
        plan = self._planned(cost, tokens, context, new)
        plan = replace(plan, skips_hidden=self._skips_hidden(plan))
        if (not plan.tokens or plan.skips_hidden) and plan.reason in _LEARNABLE:
            tries = self._tries_of(plan)
            tries.follow(cost.changes)
            tried = 0
            if tries.due:
                tried = affordable(
                    cost, self.plan, tokens, context=context, new=new, seconds=plan.seconds
                )
            if tried:
                first = self.plan.recompute
                plan = replace(plan, choice=Choice.TRY, tokens=tried, recompute_layers=first)
        return self._with_copies(cost, plan)

    def as_stored(self, tokens: int) -> RestorePlan:
        """Restore what a history that was met has left to restore, without weighing it."""
        plan, cost = self._all_of(tokens, Reason.AS_STORED), self._weighed
        return plan if cost is None else self._with_copies(cost, plan)

    def take(self, plan: RestorePlan) -> None:
        """The plan is carried out in the pass that begins next: count it."""
        if plan.tokens and self._can_recompute:  # else nothing is shared
            self._taken.append(plan)
        if plan.choice is Choice.TRY:
            self._tries_of(plan).tried()
        elif plan.skips_hidden:
            self._hidden_tries.refused()
        self._count(plan.choice, plan.reason)

    def share(self, loads: Sequence[Load]) -> tuple[int, ...]:
        """A pass with these restorations, which were taken, begins: the layers that each of them
        recomputes. A try stays what it is, and so does whatever is in its pass."""
        taken, self._taken = self._taken, []
        cost, tries = self._weighed, any(plan.choice is Choice.TRY for plan in taken)
        if cost is None or tries or not self._can_recompute:
            return tuple(load.recompute for load in loads)
        return shared(cost, self.plan, loads, [plan.rest for plan in taken])

    def refuse(self, reason: Reason) -> None:
        """Count that nothing is restored."""
        if reason in _LEARNABLE:
            self._restore_tries.refused()
        self._count(Choice.REFUSE, reason)

    def kv_per_hidden(self, tokens: int) -> float:
        """KV layers between two HIDDEN layers in the order of copies; see `policy.copy_order`."""
        return 0.0 if self.costs is None else copy_order.kv_per_hidden(self.costs, tokens)

    def block_read_seconds(self, tier: SourceTier) -> float:
        """Seconds to read one block of many into host memory; 0 when that is not known."""
        return BLOCK_TOKENS * self._copy_token(tier)

    def block_seconds(self, tier: SourceTier) -> float:
        """`block_read_seconds` as far as it is weighed: 0 where everything is restored, and for a
        block that host memory has elsewhere."""
        weighed = tier is not SourceTier.HOST and not self.always
        return self.block_read_seconds(tier) if weighed else 0.0

    def token_seconds(self, tier: SourceTier) -> float:
        """Seconds to restore one token of many from a tier."""
        host = self._copy_token(SourceTier.HOST) or 1.0
        if tier is SourceTier.HOST:
            return host
        read = self._copy_token(tier)
        return read + host if read else FAR_SECONDS * host

    def split(self, history: History, decoding: int, can_restore_early: bool) -> Split | None:
        """Where a history that comes from below should meet the part of it that is computed while
        so many requests decode; None when the costs of that are not known or not weighed."""
        cost = self._weighed
        if cost is None or not all(cost.knows(span.tier) for span in history.coming):
            return None
        return best_split(
            cost,
            self.plan,
            history,
            decoding=decoding,
            can_recompute=self._can_recompute,
            can_restore_early=can_restore_early and self.can_restore_early,
        )

    def prefill_seconds(self, new: int, context: int) -> float:
        """Seconds to compute `new` tokens behind `context` tokens; 0 when that is not known."""
        if self.costs is None:
            return 0.0
        return self.plan.num_layers * self.costs.prefill_layer(new, context)

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
        cost = self._weighed
        if cost is None:
            return None
        self._fetch_tries.follow(cost.changes)
        return self._fetch_tries

    def try_seconds(self, context: int, new: int) -> float:
        """Longest seconds that a request with `new` tokens to compute waits for such a fetch."""
        return 0.0 if self._weighed is None else TRY_SHARE * self.prefill_seconds(new, context)

    @property
    def _weighed(self) -> CostModel | None:
        """The costs that decide; None when everything is restored."""
        return None if self.always else self.costs

    def _all_of(self, tokens: int, reason: Reason) -> RestorePlan:
        return RestorePlan(Choice.LOAD, reason, tokens, self.plan.recompute)

    def _tries_of(self, plan: RestorePlan) -> Tries:
        return self._hidden_tries if plan.skips_hidden else self._restore_tries

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
            first=self._end_seconds,
            allow_recompute=self._can_recompute,
        )

    def _with_copies(self, cost: CostModel, plan: RestorePlan) -> RestorePlan:
        """The plan, with the seconds to copy the layers that it loads."""
        if not plan.tokens:
            return plan
        first, stored = plan.recompute_layers, self.plan
        kv = min(stored.kv, stored.num_layers - first)
        loaded = LayerPlan(first, stored.num_layers - first - kv, kv)
        seconds = cost.copy_stored(SourceTier.HOST, loaded, plan.tokens) + self._end_seconds
        return replace(plan, copy_seconds=seconds)

    @property
    def _end_seconds(self) -> float:
        """Of the copies that come with any restoration."""
        return self._end_tokens * self._copy_token(SourceTier.HOST) if self._end_tokens else 0.0

    def _copy_token(self, tier: SourceTier) -> float:
        """Seconds to copy one token of a long history; 0 when that is not known."""
        if self.costs is None or not self.costs.knows(tier):
            return 0.0
        return self.costs.copy_stored(tier, self.plan, LONG_HISTORY) / LONG_HISTORY

    def _count(self, choice: Choice, reason: Reason) -> None:
        self._counters[f"restore_decision_{choice.value}"] += 1
        self._counters[f"restore_reason_{reason.value}"] += 1
