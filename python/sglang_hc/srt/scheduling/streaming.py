"""Numbers of a server whose state is in host memory (`--hc-throughput`): it has no tiers."""

from __future__ import annotations

import time
from typing import Any

from sglang_hc.policy.streaming_report import Report
from sglang_hc.srt.engine.scheduler import OwnScheduler
from sglang_hc.srt.hybrid.attention import StreamedAttention

OWN = "_hc_streaming"
"""Attribute of a Scheduler that streams: our `OwnScheduler`."""


def attach(scheduler: Any) -> None:
    """Behind Scheduler.__init__."""
    if isinstance(scheduler.tp_worker.model_runner.attn_backend, StreamedAttention):
        setattr(scheduler, OWN, OwnScheduler(scheduler))


def report_of(scheduler: Any) -> Report | None:
    """What passed so far; None where state stays on the device."""
    if not hasattr(scheduler, OWN):
        return None
    backend = scheduler.tp_worker.model_runner.attn_backend
    plan = backend.streamed.plan
    assert plan is not None
    backend.units.take_time()
    return Report(plan, backend.units.passed)


def publish(scheduler: Any) -> None:
    """Behind a pass, with --enable-metrics."""
    own: OwnScheduler | None = getattr(scheduler, OWN, None)
    if own is None or own.exporter is None or not own.exporter.due(time.monotonic()):
        return
    report = report_of(scheduler)
    assert report is not None
    own.exporter.publish(report.levels(), report.counts())
