"""Fetch costs of constant rates."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.meeting import History, Split
from sglang_hc.queue.fetches import UnknownCosts


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

    def split(self, history: History, decoding: int, early_from: int | None) -> Split | None:
        if not self.meets:
            return None
        half = sum(span.tokens for span in history.coming) // BLOCK_TOKENS // 2 * BLOCK_TOKENS
        return Split(half, half / self.prefill_tokens_per_s, half / self.prefill_tokens_per_s)
