"""Fetch costs of constant rates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConstantRates:
    """FetchCosts: seconds to read a block, and prefilled tokens per second; restoring is free."""

    block_seconds: float
    prefill_tokens_per_s: float

    def saved_seconds(self, host: int, fetched: int, context: int, new: int) -> float:
        return fetched / self.prefill_tokens_per_s

    @property
    def tries(self) -> None:
        """These costs are not doubted."""

    def try_seconds(self, context: int, new: int) -> float:
        return 0.0
