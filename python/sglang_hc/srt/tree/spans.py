"""What OpenTelemetry is told of restorations (`--enable-trace`): attributes of the span that SGLang
has of a request in the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from sglang_hc.policy.restore_plan import RestorePlan
from sglang_hc.restore.timed_restorer import PENDING, Timed
from sglang_hc.srt.binding import fields
from sglang_hc.srt.tree.prompt_sources import tokens_by_tier
from sglang_hc.tree.block_tree import BlockNode

PREFIX = "hc."
TOLD = "hc_told"
"""Attribute of a request: what its span was told."""


class Spans:
    """Belongs to the scheduler thread."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[RestorePlan, Any]] = deque(maxlen=PENDING)
        """Plans whose pass is not over, with their requests."""

    def restored(
        self, req: Any, path: Sequence[BlockNode], plan: RestorePlan, start: int, stop: int
    ) -> None:
        """Tokens [start, stop) of a request are about to be restored from blocks of its path. Where
        this comes in parts, tokens and seconds add up, and the last plan stays."""
        if not fields.is_traced(req):
            return
        told: dict[str, Any] = getattr(req, TOLD, {})
        for tier, tokens in tokens_by_tier(path, start, stop):
            name = f"{PREFIX}restored_tokens.{tier.value}"
            told[name] = told.get(name, 0) + tokens
        told[f"{PREFIX}plan"] = plan.choice.value
        told[f"{PREFIX}reason"] = plan.reason.value
        told[f"{PREFIX}recomputed_layers"] = plan.recompute_layers
        setattr(req, TOLD, told)
        fields.add_to_trace(req, told)
        self._waiting.append((plan, req))

    def timed(self, timed: Timed) -> None:
        """A pass is over; a request that was told its last token before then is not told."""
        over, waiting = {id(plan) for plan in timed.plans}, self._waiting
        self._waiting = deque(maxlen=PENDING)
        for plan, req in waiting:
            if id(plan) not in over:
                self._waiting.append((plan, req))
                continue
            told: dict[str, Any] = getattr(req, TOLD)
            name = f"{PREFIX}restore_seconds"
            told[name] = told.get(name, 0.0) + timed.seconds
            fields.add_to_trace(req, {name: told[name]})
