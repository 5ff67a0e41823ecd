"""When the server does what its costs advise against, to see whether they are right.

A server whose profile says that restoring is slow restores nothing, and so never sees how fast it
would have been. Therefore it restores a little now and then. A count of refusals says when, so that
the same run makes the same tries.
"""

from __future__ import annotations

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.cost_model import CostModel
from sglang_hc.policy.restore_plan import plan_restore

LAST_GAP = 32
"""Most refusals between two tries."""

TRY_SHARE = 1.0
"""Most that a try may add to the modelled time of its request, as a share of that time. With
LAST_GAP this bounds what all tries cost in the long run: 1/33 of the time of what is refused."""


class Tries:
    """When one kind of refusal becomes a try: the first time, then after 1, 2, 4, ... LAST_GAP
    further refusals. The schedule begins again when the costs change, because then the last tries
    have shown something.
    """

    def __init__(self) -> None:
        self._gap = 1
        self._left = 0
        self._changes = 0

    @property
    def due(self) -> bool:
        """Whether the next refusal should be a try."""
        return self._left == 0

    def refused(self) -> None:
        """Something was refused, and not tried."""
        self._left = max(0, self._left - 1)

    def tried(self) -> None:
        """A try was made."""
        self._left = self._gap
        self._gap = min(2 * self._gap, LAST_GAP)

    def follow(self, changes: int) -> None:
        """changes: how often the costs were changed so far (`CostModel.changes`)."""
        if changes != self._changes:
            self._changes = changes
            self._gap = 1
            self._left = min(self._left, 1)


def affordable(
    cost: CostModel, stored: LayerPlan, tokens: int, *, context: int, new: int, seconds: float
) -> int:
    """How many of the first `tokens` to load for a try, all stored layers of them.

    seconds: modelled time of what would be done instead. All tokens, half of them, a quarter and so
    on in whole blocks: the most by which the modelled time grows by no more than TRY_SHARE; 0 where
    even one block costs more, or there is none.
    """
    total = tokens
    while tokens >= BLOCK_TOKENS:
        behind = new + total - tokens
        plan = plan_restore(
            cost, stored, tokens, context=context, new=behind, allow_recompute=False
        )
        if plan.as_stored_seconds <= (1 + TRY_SHARE) * seconds:
            return tokens
        if tokens == BLOCK_TOKENS:
            return 0
        tokens = max(BLOCK_TOKENS, tokens // 2 // BLOCK_TOKENS * BLOCK_TOKENS)
    return 0
