"""What a tree tells of itself: /server_info, our metrics, and those of SGLang that it fills."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_hc.metrics import Exporter
from sglang_hc.policy.correction import Resource
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.restore_plan import RestorePlan
from sglang_hc.restore.timed_restorer import Timed, TimedRestorer, row_bytes
from sglang_hc.srt.engine.scheduler import OwnScheduler
from sglang_hc.srt.model.weight_versions import WeightVersions
from sglang_hc.srt.tree.prompt_sources import PromptSources
from sglang_hc.srt.tree.sglang_families import SglangFamilies
from sglang_hc.srt.tree.spans import Spans
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import BlockNode

SHOWN = 5
"""Slowest restore passes in /server_info."""

SHOWN_S = 600.0
"""They are of so many seconds."""

RECENT = 512
"""Restore passes that are remembered at most."""

WORK = {
    Resource.KV_COPY: "copy",
    Resource.HIDDEN_COPY: "copy",
    Resource.PROJECTION: "projection",
    Resource.PREFILL: "prefill",
    Resource.ATTENTION: "prefill",
    Resource.DISK: "disk",
    Resource.REMOTE: "remote",
}
"""What a resource is called in `predicted_over_observed`."""


class _Ended(NamedTuple):
    """A restore pass, and when it was seen to be over."""

    at: float
    timed: Timed


class Reporting:
    """Belongs to the scheduler thread."""

    def __init__(
        self, tiers: Tiers, scheduler: OwnScheduler, collector: Any, weights: WeightVersions
    ) -> None:
        """collector: SGLang's, of its radix cache; None without --enable-metrics."""
        self._weights = weights
        self._tiers, self._scheduler = tiers, scheduler
        self._collector = collector
        self._families: SglangFamilies | None = None
        self._recent: deque[_Ended] = deque(maxlen=RECENT)
        self._charted = 0
        """Of the newest passes, so many are not in the histograms yet."""
        self._disk, below = tiers.disk, None
        if self._disk is not None:
            has_disk = "disk_blocks" in self._disk.levels()
            below = SourceTier.DISK if has_disk else SourceTier.REMOTE
        self.prompts = PromptSources(below)
        self._spans = Spans()
        self._restorer: TimedRestorer = tiers.restorer
        self._restorer.on_timed = self._timed

    def restored(
        self, req: Any, path: Sequence[BlockNode], plan: RestorePlan, start: int, stop: int
    ) -> None:
        """Tokens [start, stop) of a request are about to be restored from blocks of its path."""
        self.prompts.restored(req, path, start, stop)
        self._spans.restored(req, path, plan, start, stop)
        self._restorer.decided(plan)

    def stats(self) -> dict[str, object]:
        """For /server_info: plain numbers, and the slowest restore passes of the last minutes."""
        now = time.monotonic()
        recent = [one for one in self._recent if now - one.at <= SHOWN_S]
        slowest = sorted(recent, key=lambda one: one.timed.seconds, reverse=True)[:SHOWN]
        shown = [_shown(one.timed, now - one.at) for one in slowest]
        own = {**+Counter(self._own()), "weights": self._weights.shown}
        return {**self._tiers.stats(), **own, "slowest_restorations": shown}

    def publish(self) -> None:
        """Bring the metrics up to date, if that is due."""
        exporter = self._scheduler.exporter
        if exporter is None or not exporter.due(time.monotonic()):
            return
        counts = {**self._tiers.counts(), **self._own()}
        exporter.publish(self._tiers.levels(), counts)
        if self._families is None and self._collector is not None:
            name = None if self._disk is None else self._disk.name
            size = row_bytes(self._tiers.layout)
            self._families = SglangFamilies(self._collector, size, name)
        if self._families is not None:
            self._families.publish(counts)
        self._chart(exporter)

    def _own(self) -> dict[str, int]:
        """Numbers that only grow, beside those of the tiers."""
        return {
            **self.prompts.counts,
            "restored_bytes": self._restorer.restored_bytes,
            "weight_changes": self._weights.changes,
        }

    def _timed(self, timed: Timed) -> None:
        self._spans.timed(timed)
        self._recent.append(_Ended(time.monotonic(), timed))
        self._charted = min(self._charted + 1, RECENT)

    def _chart(self, exporter: Exporter) -> None:
        """What was timed since the last call goes into the histograms."""
        new, self._charted = self._charted, 0
        for ended in list(self._recent)[len(self._recent) - new :]:
            exporter.observe("restore_seconds", ended.timed.seconds)
            if self._families is not None:
                self._families.restored(ended.timed.seconds)
        fetched = () if self._disk is None else self._disk.fetched
        while fetched:
            tier, seconds = fetched.popleft()
            exporter.observe("fetch_seconds", seconds, tier.value)
        costs = self._restorer.planner.costs
        while costs is not None and costs.ratios:
            resource, ratio = costs.ratios.popleft()
            exporter.observe("predicted_over_observed", ratio, WORK[resource])


def _shown(timed: Timed, age: float) -> dict[str, object]:
    """A restore pass, what was expected of its copies, and why it was decided."""
    reasons = Counter(plan.reason.value for plan in timed.plans)
    return {
        "seconds": round(timed.seconds, 6),
        "expected_seconds": round(sum(plan.copy_seconds for plan in timed.plans), 6),
        "tokens": timed.tokens,
        "reasons": dict(reasons) if timed.plans else {"before_its_pass": 1},
        "age_s": round(age, 1),
    }
