"""The loaded model for which tiers are built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_hc.config import HcConfig
from sglang_hc.srt.engine.scheduler import OwnScheduler
from sglang_hc.srt.model.model_state import ModelState
from sglang_hc.srt.ranks.replicas import Place


@dataclass(frozen=True)
class Model:
    """A loaded model. runner, params: SGLang's model runner and the parameters of its radix cache.
    draft: the runner of a draft model; None without one. place: of its scheduler among all."""

    config: HcConfig
    runner: Any
    params: Any
    state: ModelState
    scheduler: OwnScheduler
    draft: Any
    place: Place

    @property
    def allocator(self) -> Any:
        """SGLang's allocator of device slots."""
        return self.params.token_to_kv_pool_allocator
