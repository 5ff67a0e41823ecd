"""Where a history that is computed from the front and read from the back should meet.

A history lies below host memory. While the source reads whole blocks from its end backwards, the
model computes its beginning like any prompt; what was read is restored behind that. So the source
and the device work at the same time (HCache hides the source behind the compute the same way, layer
by layer instead of token by token). With nothing computed this is a plain read and restoration,
with nothing read a plain recomputation: both are candidates, so what is chosen is never slower than
either by the cost model.

Blocks are restored when all are here, or as they come: then the device restores while the source
reads the others, and little is left behind the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.makespan import makespan
from sglang_hc.policy.restore_plan import plan_restore


class Span(NamedTuple):
    """Consecutive stored tokens of one tier. taken: seconds for which the tier has read them
    already, only for the last span of a tier. A call to a store may bring several blocks at once,
    and none before its end."""

    tier: SourceTier
    tokens: int
    taken: float = 0.0


class History(NamedTuple):
    """A history that is not on the device, in tokens from the front to the back.

    context: before it, on the device. coming: below host memory, or on the way from there, by
    where it lies. held: behind those, in host memory. new: behind them, not stored anywhere.
    restored: tokens among the last ones that the device has already.
    """

    context: int
    coming: Sequence[Span]
    held: int
    new: int
    restored: int = 0

    def read_seconds(self, cost: CostModel, stored: LayerPlan, head: int) -> float:
        """Until all that is coming behind its first `head` tokens is in host memory. Disk and
        remote store read at the same time. What is overdue is expected at once; how long it may be
        waited for is the caller's decision. Raises KeyError for a tier that `cost` does not
        know."""
        tokens: Counter[SourceTier] = Counter()
        taken = dict.fromkeys(SourceTier, 0.0)
        for span in self.coming:
            computed = min(head, span.tokens)
            head -= computed
            left = span.tokens - computed
            tokens[span.tier] += left
            if span.taken:  # it has not read what was not asked for
                taken[span.tier] += min(span.taken, cost.copy_stored(span.tier, stored, left))
        return max(
            (cost.copy_stored(t, stored, n) - taken[t] for t, n in tokens.items() if n), default=0.0
        )


def from_below(tier: SourceTier, tokens: int, new: int) -> History:
    """All of a history in one tier."""
    return History(0, [Span(tier, tokens)], 0, new)


class Split(NamedTuple):
    """Compute the first `head` of the tokens that are coming, and read the others.

    seconds: until the new tokens are through the last layer. stall: of them, those in which nothing
    else can run on the device while the head is computed. as_they_come: blocks are restored while
    others are read, and not all of them when the last one is here.
    """

    head: int
    seconds: float
    stall: float
    as_they_come: bool = False


def best_split(
    cost: CostModel,
    stored: LayerPlan,
    history: History,
    *,
    decoding: int = 0,
    can_recompute: bool = True,
    can_restore_early: bool = True,
) -> Split:
    """The fastest way to bring a history back and run the new tokens behind it.

    decoding: requests that wait for the device while the head is computed; the seconds of each of
    them count as much as those of this request. can_recompute: see `plan_restore`.
    can_restore_early: blocks may be restored as they come. They never are where the layer plan
    recomputes layers, because these need the K and V of everything before.
    A head is a whole number of blocks, or everything that is coming. Ties go to the shorter head.
    Raises KeyError for a tier that `cost` does not know.
    """
    ways = _Ways(cost, stored, history, can_recompute)
    blocks = ways.coming // BLOCK_TOKENS
    found = [ways.late(head) for head in _heads(blocks, ways.coming, ways.computes_longer)]
    if can_restore_early and not stored.recompute:
        found += map(ways.early, _heads(blocks, ways.coming, ways.works_longer))
    return min(found, key=lambda split: (split.seconds + decoding * split.stall, split.head))


def _heads(blocks: int, coming: int, too_long: Callable[[int], bool]) -> list[int]:
    """Heads among which the best one is, in tokens. too_long(head): the device takes at least as
    long as the source; with a longer head it takes longer still."""
    low, high = 0, blocks  # the first whole number of blocks that is too long
    while low < high:
        middle = (low + high) // 2
        if too_long(middle * BLOCK_TOKENS):
            high = middle
        else:
            low = middle + 1
    # Left of the crossing a longer head is faster; right of it that depends on what a restored
    # token costs. Somewhere between may be best when others decode.
    quarters = {blocks * part // 4 for part in (1, 2, 3)}
    between = {low + (blocks - low) * part // 4 for part in (1, 2, 3)}
    counts = {0, max(0, low - 1), low, *quarters, *between}
    return sorted({count * BLOCK_TOKENS for count in counts} | {coming})


class _Ways:
    """Prices of one history by its head."""

    def __init__(
        self, cost: CostModel, stored: LayerPlan, history: History, can_recompute: bool
    ) -> None:
        self._cost, self._stored, self._history = cost, stored, history
        self._can_recompute = can_recompute
        self.coming = sum(span.tokens for span in history.coming)

    def late(self, head: int) -> Split:
        """What comes is restored when the last block is here."""
        rest = self._rest(head)
        if rest == 0:
            return self._computed(head)
        stall = self._compute(head)
        behind = plan_restore(
            self._cost,
            self._stored,
            rest,
            context=self._history.context + head + self._history.restored,
            new=self._history.new,
            allow_recompute=self._can_recompute,
        )
        return Split(head, max(stall, self._read(head)) + behind.seconds, stall)

    def early(self, head: int) -> Split:
        """What comes is restored as soon as the device has nothing to compute."""
        rest = self._rest(head)
        if rest == 0:
            return self._computed(head)
        stall, read, last = self._compute(head), self._read(head), self._last_run(head)
        first = 0.0 if self._history.held else read * BLOCK_TOKENS / max(BLOCK_TOKENS, rest)
        before = max(stall, first) + self._restore(rest - last)
        context = self._history.context + head + rest - last
        return Split(head, max(before, read) + self._restore(last, context), stall, True)

    def computes_longer(self, head: int) -> bool:
        """Whether the head takes as long as reading the rest."""
        return self._compute(head) >= self._read(head)

    def works_longer(self, head: int) -> bool:
        """As `computes_longer`, when the rest is restored meanwhile."""
        work = self._compute(head) + self._restore(self._rest(head))
        return work >= self._read(head)

    def _rest(self, head: int) -> int:
        return self.coming - head + self._history.held

    def _computed(self, head: int) -> Split:
        """Nothing is left to restore."""
        history, layers = self._history, self._stored.num_layers
        if history.restored:  # what is behind the head is there, and the new tokens come behind it
            stall = self._compute(head)
            context = history.context + head + history.restored
            seconds = stall + layers * self._cost.prefill_layer(history.new, context)
            return Split(head, seconds, stall)
        seconds = layers * self._cost.prefill_layer(head + history.new, history.context)
        return Split(head, seconds, seconds)

    def _compute(self, head: int) -> float:
        return self._stored.num_layers * self._cost.prefill_layer(head, self._history.context)

    def _read(self, head: int) -> float:
        return self._history.read_seconds(self._cost, self._stored, head)

    def _last_run(self, head: int) -> int:
        """Tokens that are restored behind the last block's arrival: those that came while the run
        before them was restored. A run of so many is restored while as many are read; where no run
        is, the device is behind the source, and one block is as good as any."""
        rest, coming = self._rest(head), self.coming - head
        if not coming:
            return rest
        token_seconds = self._read(head) / coming
        tokens = BLOCK_TOKENS
        while tokens < rest:
            if self._restore(tokens) <= tokens * token_seconds:
                return tokens
            tokens *= 2
        return min(BLOCK_TOKENS, rest)

    def _restore(self, tokens: int, context: int | None = None) -> float:
        """Seconds to restore tokens that are in host memory; with `context` tokens before them,
        also to run the new ones."""
        history = self._history
        if context is None:
            return restore_alone(self._cost, self._stored, tokens)
        times = self._cost.layer_times(
            SourceTier.HOST, tokens, context=context + history.restored, new=history.new
        )
        return makespan(times, self._stored)


def restore_alone(cost: CostModel, stored: LayerPlan, tokens: int) -> float:
    """Seconds to restore tokens that are in host memory as they are stored, and nothing else."""
    return makespan(cost.layer_times(SourceTier.HOST, tokens)._replace(new=0.0), stored)
