"""Records of servers (`--hc-trace`) as others may hand them to us: replayed, or the one documented
error; as a load of the simulator likewise. Never another exception, and never without end.

Most examples are a real record in which lines and values were exchanged, so that what lies behind
the first check is read too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_hc.tools.simulator.recorded import replay_record
from sglang_hc.tools.simulator.traces import Timing, read_trace
from sglang_hc.tools.workloads.traces import TraceError
from support.recorded_server import Server

READ: dict[str, Callable[[Path], object]] = {
    "replay": replay_record,
    "load": lambda path: read_trace(path, Timing()),
}

HEADER = {"trace": "sglang-hc", "version": 1, "host_slots": 4, "slot_bytes": 1, "page_size": 1,
          "layer_plan": "kv:4", "eviction": "queue", "prefetch": "queue"}  # fmt: skip
ODD = st.sampled_from(
    [None, True, -1, 0, 1, 2, 1.5, 1 << 31, 1 << 70, "", "0", "AAAA", "x", "\u2028", [], [0], [[0]],
     {}, {"0": [0]}, {"x": 1}]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


@cache
def real() -> tuple[dict[str, Any], ...]:
    """A record as a server writes it: its header and its first events."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        Server(path, 1).run(60)
        lines = path.read_text().splitlines()
    return tuple(json.loads(line) for line in lines)


def text_of(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """The real record, with some changes to its values and to the order of its lines."""
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
        rows = [row or {"op": "clear"} for row in rows]
    return text_of(rows)


OPS = st.sampled_from(["root", "block", "arrive", "look", "discard", "admit", "passed", "gone",
                       "finish", "stage", "unstage", "publish", "ready", "access", "pin", "unpin",
                       "hold", "evict", "drop", "clear", "lost", "end", "left", "compare", "at",
                       "_class__", "_init__"])  # fmt: skip
FEW = st.integers(0, 2)
EVENTS = st.fixed_dictionaries(
    {"op": OPS},
    optional={
        "block": FEW, "parent": FEW | st.none(), "path": FEW, "req": FEW, "slot": FEW,
        "under": st.integers(-1, 2), "tokens": st.sampled_from(["", "AAAA", "AAAAAQ==", "A" * 344]),
        "t": st.floats(0, 9), "order": st.lists(FEW, max_size=2), "created": st.booleans(),
        "needs": st.dictionaries(FEW.map(str), st.lists(FEW, max_size=2), max_size=2),
        "limit": FEW, "device": FEW, "hit": FEW, "disk": FEW, "restored": FEW, "count": FEW,
        "gone": st.lists(FEW, max_size=2), "spared": st.lists(FEW, max_size=2),
        "slots": st.lists(FEW, max_size=2), "on": st.booleans(), "events": FEW,
    },
)  # fmt: skip
MADE = st.lists(EVENTS | st.dictionaries(st.text(max_size=5), JSON, max_size=3), max_size=12)


def after_header(*rows: Any, **header: Any) -> bytes:
    return text_of([{**HEADER, **header}, *rows])


ROOT = {"op": "root", "block": 0}
BLOCK = {"op": "block", "block": 1, "parent": 0, "tokens": "AAAA"}
ARRIVE = {"op": "arrive", "t": 0.0, "req": 0, "path": 1}


@pytest.mark.parametrize("reader", READ)
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
@example(data=after_header(host_slots=1 << 62))
@example(data=after_header(host_slots="many"))
@example(data=after_header(page_size=0))
@example(data=after_header(eviction=[]))
@example(data=after_header({"op": "_class__"}))
@example(data=after_header({"op": ["root"]}))
@example(data=after_header() + b"[" * 100_000 + b"\n")
@example(data=after_header() + b"\xff\n")
def test_a_record_is_read_or_refused(reader: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    try:
        READ[reader](path)
    except TraceError as error:
        assert str(error).startswith(str(path)) and len(str(error)) < 2000


def test_the_record_that_is_changed_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(text_of(list(real())))
    comparison = replay_record(path)
    assert comparison.equal and comparison.whole and comparison.admissions > 5
