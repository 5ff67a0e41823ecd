"""Spans of OpenTelemetry, with its real SDK: SGLang's span of a request says what was restored."""

from __future__ import annotations

import importlib.util
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.restore_plan import Choice, Reason, RestorePlan
from sglang_hc.restore.timed_restorer import Timed
from support.core import Core, run_in_child
from support.prompts import SMALL, prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("opentelemetry.sdk") is None,
        reason="the package opentelemetry-sdk is not on the path; `make stores` puts it there",
    ),
]


class Traced:
    """SGLang's tracing in this process, whose spans stay here. told: takes our attributes of the
    spans that ended since the last call."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from sglang.srt.observability import req_time_stats, trace

        self._exporter, self._trace, self._stats = InMemorySpanExporter(), trace, req_time_stats
        trace.get_otlp_span_exporter = lambda endpoint: self._exporter
        trace.process_tracing_init("nowhere", "test")
        trace.trace_set_thread_info("Scheduler")

    def request(self, rid: str) -> Any:
        """What SGLang's tokenizer sends of a request that it traces."""
        stats = self._stats.APIServerReqTimeStats()
        stats.init_trace_ctx(rid, None)
        stats.trace_ctx.trace_req_start()
        return pickle.loads(pickle.dumps(stats))

    def received(self, sent: Any) -> Any:
        """What SGLang's scheduler makes of it."""
        return self._stats.SchedulerReqTimeStats.new_from_obj(sent)

    def told(self) -> list[dict[str, Any]]:
        self._trace.trace.get_tracer_provider().force_flush()
        spans = [dict(span.attributes or {}) for span in self._exporter.get_finished_spans()]
        self._exporter.clear()
        ours = [{k: v for k, v in span.items() if k.startswith("hc.")} for span in spans]
        return [span for span in ours if span]


def by_sglangs_records() -> list[dict[str, Any]]:
    from sglang_hc.srt.tree.spans import Spans

    traced, spans = Traced(), Spans()
    stats = traced.received(traced.request("r"))
    req: Any = SimpleNamespace(time_stats=stats)
    path: Any = [SimpleNamespace(source=tier) for tier in (SourceTier.HOST, SourceTier.REMOTE)]
    plan = RestorePlan(Choice.LOAD, Reason.ALWAYS, 118, 1)
    spans.restored(req, path, plan, 10, 128)
    spans.timed(Timed(0.5, 118, [plan]))
    stats.set_completion_time()
    spans.restored(req, path, plan, 10, 128)  # its span is over
    spans.timed(Timed(0.5, 118, [plan]))
    return traced.told()


def test_sglangs_span_of_a_request_gets_attributes_until_it_ends() -> None:
    assert run_in_child(by_sglangs_records) == [
        {
            "hc.restored_tokens.host": 54, "hc.restored_tokens.remote": 64, "hc.plan": "load",
            "hc.reason": "always", "hc.recomputed_layers": 1, "hc.restore_seconds": 0.5,
        }
    ]  # fmt: skip


def by_an_engine() -> list[list[dict[str, Any]]]:
    """Of the turns of a conversation that left the device between them."""
    traced = Traced()
    core, told, history = Core("--hc-forms", "kv", *SMALL), [], prompt(3, 200)
    for _ in range(2):
        rid = core.submit(history, 8)
        core.inbox[-1].time_stats = traced.request(rid)
        core.run()
        history += core.reply(rid).tokens
        told.append(traced.told())
        core.push_out()
    return told


def test_an_engine_tells_what_it_restores(models: None) -> None:
    first, second = run_in_child(by_an_engine)
    assert not first
    (told,) = second
    assert 0 < told.pop("hc.restore_seconds") < 600
    assert told.pop("hc.restored_tokens.host") == 200 + 8 - 1, "the last token has no state yet"
    assert told["hc.plan"] == "load"
