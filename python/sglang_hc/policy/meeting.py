"""Where a history that is computed from the front and read from the back should meet.

A history lies below host memory. While the source reads whole blocks from its end backwards, the
model computes its beginning like any prompt; what was read is restored behind that. So the source
and the device work at the same time (HCache hides the source behind the compute the same way, layer
by layer instead of token by token). With nothing computed this is a plain read and restoration,
with nothing read a plain recomputation: both are candidates, so what is chosen is never slower than
either by the cost model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.restore_plan import Span, plan_restore


class History(NamedTuple):
    """A history that is not on the device, in tokens from the front to the back.

    context: before it, on the device. coming: below host memory, or on the way from there, by
    where it lies. held: behind those, in host memory. new: behind them, not stored anywhere.
    """

    context: int
    coming: Sequence[Span]
    held: int
    new: int

    def read_seconds(self, cost: CostModel, stored: LayerPlan, head: int) -> float:
        """Until all that is coming behind its first `head` tokens is in host memory. Disk and
        remote store read at the same time. Raises KeyError for a tier that `cost` does not know."""
        tokens: Counter[SourceTier] = Counter()
        for span in self.coming:
            computed = min(head, span.tokens)
            head -= computed
            tokens[span.tier] += span.tokens - computed
        return max((cost.copy_stored(t, stored, n) for t, n in tokens.items() if n), default=0.0)


class Split(NamedTuple):
    """Compute the first `head` of the tokens that are coming, and read the others.

    seconds: until the new tokens are through the last layer. stall: of them, those in which nothing
    else can run on the device while the head is computed.
    """

    head: int
    seconds: float
    stall: float


def best_split(
    cost: CostModel,
    stored: LayerPlan,
    history: History,
    *,
    decoding: int = 0,
    can_recompute: bool = True,
) -> Split:
    """The fastest way to bring a history back and run the new tokens behind it.

    decoding: requests that wait for the device while the head is computed; the seconds of each of
    them count as much as those of this request. can_recompute: see `plan_restore`.
    A head is a whole number of blocks, or everything that is coming. Ties go to the shorter head.
    Raises KeyError for a tier that `cost` does not know.
    """
    coming = sum(span.tokens for span in history.coming)

    def compute(head: int) -> float:
        return stored.num_layers * cost.prefill_layer(head, history.context)

    def split(head: int) -> Split:
        rest = coming - head + history.held
        context, stall = history.context + head, compute(head) if head else 0.0
        if rest == 0:
            seconds = stored.num_layers * cost.prefill_layer(head + history.new, history.context)
            return Split(head, seconds, seconds)
        read = history.read_seconds(cost, stored, head)
        behind = plan_restore(
            cost,
            stored,
            [Span(SourceTier.HOST, rest)],
            context=context,
            new=history.new,
            allow_recompute=can_recompute,
        )
        return Split(head, max(stall, read) + behind.seconds, stall)

    blocks = coming // BLOCK_TOKENS
    low, high = 0, blocks  # the first whole number of blocks that takes as long as reading the rest
    while low < high:
        middle = (low + high) // 2
        head = middle * BLOCK_TOKENS
        if compute(head) < history.read_seconds(cost, stored, head):
            low = middle + 1
        else:
            high = middle
    # Left of the crossing a longer head is faster; right of it that depends on what a restored
    # token costs. Somewhere between may be best when others decode.
    quarters = {blocks * part // 4 for part in (1, 2, 3)}
    between = {low + (blocks - low) * part // 4 for part in (1, 2, 3)}
    counts = {0, max(0, low - 1), low, *quarters, *between}
    heads = sorted({count * BLOCK_TOKENS for count in counts} | {coming})
    return min(
        (split(head) for head in heads), key=lambda found: found.seconds + decoding * found.stall
    )
