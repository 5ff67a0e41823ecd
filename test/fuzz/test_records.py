"""Traces of servers (`--hc-trace`) as others may hand them to us: a load, or the one documented
error. Never another exception, and never without end.

Most examples are a real trace in which lines and values were exchanged, so that what lies behind
the first check is read too.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_hc.queue.requests import Serial
from sglang_hc.tiers.trace import Recorder
from sglang_hc.tools.workloads.reading import Timing, read_trace
from sglang_hc.tools.workloads.recorded import read_record
from sglang_hc.tools.workloads.traces import TraceError
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.json_values import json_values

HEADER = {"trace": "sglang-hc", "version": 3, "host_slots": 4, "slot_bytes": 1, "page_size": 1,
          "layer_plan": "kv:4", "eviction": "queue", "prefetch": "queue", "model": "Llama",
          "context": 99, "kv_tokens": 99, "running": 2, "chunk": 0, "mixed": False}  # fmt: skip
ODD = st.sampled_from(
    [None, True, -1, 0, 1, 2, 1.5, 1 << 31, 1 << 70, "", "0", "AAAA", "x", "\u2028", [], [0], [[0]],
     {}, {"0": [0]}, {"x": 1}]
)  # fmt: skip
REQUESTS = 12
JSON = json_values(st.text(max_size=9))


@cache
def real() -> tuple[dict[str, Any], ...]:
    """A trace as a server writes it."""
    rng = random.Random(1)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        recorder = Recorder(path, HEADER, bytes(16), clock=lambda: 0.0)
        for request in map(Serial, range(REQUESTS)):
            namespace = rng.choice([None, "tenant"])
            prompt = [rng.randrange(2)] * 64 + [rng.randrange(2)] * rng.randint(1, 80)
            recorder.arrived(request, Prefix(namespace, pack_tokens(prompt)))
            recorder.matched(request, 0, 0)
            recorder.admitted(request, 0, 0)
            recorder.answered(request)
            recorder.finished(request, Prefix(namespace, pack_tokens([*prompt, 7, 8])))
        recorder.close()
        lines = path.read_text().splitlines()
    return tuple(json.loads(line) for line in lines)


def text_of(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """The real trace, with some changes to its values and to the order of its lines."""
    rows = [dict(row) for row in real()]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(rows) - 1))
        match draw(
            st.sampled_from(["value", "value", "value", "missing", "twice", "gone", "swap"])
        ):
            case "value":
                rows[at][draw(st.sampled_from(sorted(rows[at])))] = draw(ODD | JSON)
            case "missing":
                rows[at].pop(draw(st.sampled_from(sorted(rows[at]))))
            case "twice":
                rows.insert(draw(st.integers(0, len(rows))), rows[at])
            case "gone" if len(rows) > 1:
                del rows[at]
            case "swap":
                other = draw(st.integers(0, len(rows) - 1))
                rows[at], rows[other] = rows[other], rows[at]
        rows = [row or {"op": "end"} for row in rows]
    return text_of(rows)


OPS = st.sampled_from(["root", "block", "arrive", "passed", "admit", "first", "gone", "finish",
                       "lost", "end", "left", "_class__"])  # fmt: skip
FEW = st.integers(0, 2)
EVENTS = st.fixed_dictionaries(
    {"op": OPS},
    optional={
        "block": FEW, "parent": FEW | st.none(), "path": FEW, "req": FEW, "t": st.floats(0, 9),
        "tokens": st.sampled_from(["", "AAAA", "AAAAAQ==", "A" * 344]),
        "device": FEW, "hit": FEW, "disk": FEW, "restored": FEW, "events": FEW,
    },
)  # fmt: skip
MADE = st.lists(EVENTS | st.dictionaries(st.text(max_size=5), JSON, max_size=3), max_size=12)


def after_header(*rows: Any, **header: Any) -> bytes:
    return text_of([{**HEADER, **header}, *rows])


ROOT = {"op": "root", "block": 0}
BLOCK = {"op": "block", "block": 1, "parent": 0, "tokens": "AAAA"}
ARRIVE = {"op": "arrive", "t": 0.0, "req": 0, "path": 1}


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    data=changed()
    | MADE.map(lambda rows: after_header(*rows))
    | st.dictionaries(st.sampled_from(sorted(HEADER)), ODD).map(lambda odd: after_header(**odd))
    | st.binary(max_size=60).map(lambda data: after_header(ROOT) + data + b"\n")
)
@example(data=after_header(ROOT, BLOCK, {**BLOCK, "parent": 1}, ARRIVE))  # above itself
@example(data=after_header(ROOT, BLOCK, {**ROOT, "block": 1}, ARRIVE))
@example(data=after_header(version=[]))
@example(data=after_header({"op": "_class__"}))
@example(data=after_header({"op": ["root"]}))
@example(data=after_header() + b"[" * 100_000 + b"\n")
@example(data=after_header() + b"\xff\n")
def test_a_trace_is_read_or_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    for read in (lambda: read_trace(path, Timing()), lambda: read_record(path)):
        try:
            read()
        except TraceError as error:
            assert str(error).startswith(str(path)) and len(str(error)) < 2000


def test_the_trace_that_is_changed_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(text_of(list(real())))
    assert read_trace(path, Timing()).num_turns == REQUESTS
    found = read_record(path)
    assert found.lost == 0 and all(request.first == 0.0 for request in found.requests)
