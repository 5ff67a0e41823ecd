"""Spans of OpenTelemetry, with its real SDK: SGLang's span of a request says what was restored."""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import pytest

from support.core import Core, run_in_child
from support.prompts import SMALL, on_disk, prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("opentelemetry.sdk") is None,
        reason="the package opentelemetry-sdk is not on the path; `make stores` puts it there",
    ),
]


def spans_of(*flags: str) -> list[list[dict[str, Any]]]:
    """Our attributes of the spans of two requests, a conversation that left the device between
    its turns."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from sglang.srt.observability import req_time_stats, trace

    exporter = InMemorySpanExporter()
    trace.get_otlp_span_exporter = lambda endpoint: exporter
    trace.process_tracing_init("nowhere", "test")
    core, found = Core("--hc-forms", "kv", *SMALL, *flags), []
    history = prompt(3, 200)
    for _ in range(2):
        rid = core.submit(history, 8)
        stats = req_time_stats.APIServerReqTimeStats()
        stats.init_trace_ctx(rid, None)
        stats.trace_ctx.trace_req_start()
        core.inbox[-1].time_stats = pickle.loads(pickle.dumps(stats))
        core.run()
        history += core.reply(rid).tokens
        stats.trace_ctx.trace_req_finish()
        trace.trace.get_tracer_provider().force_flush()
        told = [span.attributes for span in exporter.get_finished_spans()]
        found.append([{k: v for k, v in one.items() if k.startswith("hc.")} for one in told])
        exporter.clear()
        core.push_out()
    return found


@pytest.mark.parametrize("below", [False, True])
def test_the_span_of_a_request_says_what_was_restored(models: None, tmp_path, below: bool) -> None:
    first, second = run_in_child(spans_of, *(on_disk(tmp_path) if below else ()))
    assert not any(first)
    (told,) = [attributes for attributes in second if attributes]
    seconds = told.pop("hc.restore_seconds")
    assert 0 < seconds < 600
    assert told == {
        "hc.restored_tokens.host": 192, "hc.plan": "load", "hc.reason": "always",
        "hc.recomputed_layers": 0,
    }  # fmt: skip
