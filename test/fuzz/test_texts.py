"""Texts of people and clients: a value, or the one documented error; never another exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_hc import profile_file
from sglang_hc.config import HcConfig
from sglang_hc.errors import ConfigError, decode_json
from sglang_hc.tools.datasheet import parse_hardware
from sglang_hc.tools.price_file import Prices
from sglang_hc.tools.workloads.traces import READERS, TokenIds, TraceError
from support.json_values import json_values

JSON = json_values(st.text(max_size=20))
DEEP = "[" * 100_000
FIELDS = st.sampled_from(
    ["timestamp", "input_length", "output_length", "hash_ids", "chat_id", "parent_chat_id",
     "Timestamp", "Request tokens", "Response tokens", "Session ID", "conversations", "from",
     "value", "id", "format", "version", "name", "flops", "copies", "project", "prefill", "fixed",
     "ahead", "fingerprint", "session", "ttl_s", "input_ids", "namespace", "text", "forms",
     "disk", "overflow", "currency", "source", "gpu_hour"]
)  # fmt: skip
OBJECTS = st.dictionaries(FIELDS, JSON, max_size=8)
TEXTS = OBJECTS.map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=200)


def read_hc_body(name: str) -> Callable[[str], Any]:
    from sglang_hc.srt.requests import routes

    kinds = {"pin": routes.PinBody, "unpin": routes.UnpinBody}
    return lambda text: decode_json(text.encode("utf-8", "surrogatepass"), kinds[name], "the body")


READ: dict[str, Callable[[str], Any]] = {
    "profile": lambda text: profile_file.decode(text, "the file"),
    "data sheet": lambda text: parse_hardware(text, "the file"),
    "price file": lambda text: decode_json(text, Prices, "the file"),
    "CONFIG_ENV": HcConfig.from_json,
    "model config": lambda text: decode_json(text, dict[str, Any], "the file"),
    "/hc/pin": read_hc_body("pin"),
    "/hc/unpin": read_hc_body("unpin"),
}


@pytest.mark.parametrize("name", READ)
@given(text=TEXTS)
@example(text=DEEP)
@example(text='{"a":' * 100_000)
@example(text="\ud800")
@example(text="1e999")
def test_a_text_is_read_or_refused(name: str, text: str) -> None:
    try:
        READ[name](text)
    except ConfigError as error:
        assert str(error) and len(str(error)) < 2000


LINES = st.lists(OBJECTS.map(json.dumps) | st.text(max_size=80), max_size=6).map("\n".join)
BURST = st.lists(
    st.lists(st.sampled_from(["1", "", "-1", "nan", "1e30", '"', "x,y"]), max_size=5).map(",".join),
    max_size=5,
).map(lambda rows: "\n".join(["Timestamp,Session ID,Request tokens,Response tokens", *rows]))


@pytest.mark.parametrize("kind", READERS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(LINES, BURST, TEXTS).map(lambda text: text.encode("utf-8", "replace"))
    | st.binary(max_size=100)
)
@example(data=DEEP.encode())
@example(data=b"\xff\xfe\x00")
@example(data=b"Timestamp,Request tokens,Response tokens\n" + b"1" * 200_000 + b",1,1")
def test_a_trace_is_read_or_refused(kind: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    try:
        for session in READERS[kind](path, TokenIds()):
            assert all(turn.at is None or turn.at >= 0 for turn in session.turns)
    except TraceError as error:
        assert str(path) in str(error)
