"""Fetch costs of constant rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.meeting import History, Split
from sglang_hc.policy.tries import Tries
from sglang_hc.restore.planner import FAR_SECONDS


class UnknownCosts:
    """Nothing is measured: whatever is below host memory is fetched, and waited for within
    bounds. `restore.planner.RestorePlanner` without costs says the same."""

    tries: Tries | None = None

    def block_seconds(self, tier: SourceTier) -> float:
        return 0.0

    def token_seconds(self, tier: SourceTier) -> float:
        return 1.0 if tier is SourceTier.HOST else FAR_SECONDS

    def saved_seconds(self, host: int, fetched: int, context: int, new: int) -> float:
        return math.inf

    def try_seconds(self, context: int, new: int) -> float:
        return 0.0

    def split(self, history: History, decoding: int, can_restore_early: bool) -> Split | None:
        return None


UNKNOWN_COSTS = UnknownCosts()


@dataclass(frozen=True)
class ConstantRates(UnknownCosts):
    """Seconds to read a block, and prefilled tokens per second; restoring is free.

    meets: of what is coming at a request's turn the first half is computed.
    """

    seconds_per_block: float
    prefill_tokens_per_s: float
    meets: bool = False

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
