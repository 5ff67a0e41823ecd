"""Fetch costs of constant rates."""

from __future__ import annotations

from collections import Counter

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.meeting import History, Split
from sglang_hc.policy.planner import RestorePlanner


class UnknownCosts(RestorePlanner):
    """Nothing is measured: whatever is below host memory is fetched, and waited for within
    bounds."""

    def __init__(self) -> None:
        super().__init__(None, LayerPlan(0, 0, 1), False, Counter())


UNKNOWN_COSTS = UnknownCosts()


class ConstantRates(UnknownCosts):
    """Seconds to read a block, and prefilled tokens per second; restoring is free.

    meets: of what is coming at a request's turn the first half is computed.
    """

    def __init__(
        self, seconds_per_block: float, prefill_tokens_per_s: float, meets: bool = False
    ) -> None:
        super().__init__()
        self.seconds_per_block = seconds_per_block
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.meets = meets

    def block_seconds(self, tier: SourceTier) -> float:
        return self.seconds_per_block

    def saved_seconds(self, host: int, fetched: int, context: int, new: int) -> float:
        return fetched / self.prefill_tokens_per_s

    def split(self, history: History, decoding: int, can_restore_early: bool) -> Split | None:
        if not self.meets:
            return None
        coming = sum(span.tokens for span in history.coming) // BLOCK_TOKENS
        half = coming // 2 * BLOCK_TOKENS
        seconds = half / self.prefill_tokens_per_s
        return Split(half, seconds, seconds, as_they_come=True)
