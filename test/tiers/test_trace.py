"""A trace has no tokens, no names and no gaps that it does not tell; its pseudonyms keep the shape
of the radix tree."""

from __future__ import annotations

import base64
import json
import os
import threading
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.requests import Serial
from sglang_hc.tiers.trace import Pseudonyms, Recorder
from sglang_hc.tree.block_tree import common_tokens
from sglang_hc.tree.identity import BLOCK_BYTES, TOKEN_BYTES, Prefix, pack_tokens
from sglang_hc.tree.images import FIRST_ID, Image, Marks
from support.host import FINGERPRINT
from support.waiting import until


def disguise(names: Pseudonyms, tokens: list[int], namespace: str | None = None) -> bytes:
    state, out, packed = names.start(namespace), b"", pack_tokens(tokens)
    for start in range(0, len(packed), BLOCK_BYTES):
        piece, state = names.block(state, packed[start : start + BLOCK_BYTES])
        out += piece
    return out


sequences = st.lists(st.integers(0, 2), max_size=3 * BLOCK_TOKENS)


@given(st.lists(sequences, min_size=2, max_size=6))
def test_shared_prefixes_and_order_survive(many: list[list[int]]) -> None:
    names = Pseudonyms()
    ordered = sorted(pack_tokens(tokens) for tokens in many)
    plain = {packed: disguise(names, [*_unpack(packed)]) for packed in ordered}
    for a, b in pairwise(ordered):
        assert len(plain[a]) == len(a)
        assert common_tokens(plain[a], plain[b]) == common_tokens(a, b)
        assert (plain[a] <= plain[b]) == (a <= b)


def _unpack(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[i : i + 4], "big") for i in range(0, len(packed), 4)]


def test_ids_look_different_everywhere() -> None:
    names = Pseudonyms()
    out = _unpack(disguise(names, [7] * 500))
    assert len(set(out)) == 500 and all(0 <= token < 1 << 31 for token in out)
    assert _unpack(disguise(names, [7] * 500, "other"))[:10] != out[:10]
    assert _unpack(disguise(Pseudonyms(), [7] * 500))[:10] != out[:10]


def test_prompts_with_images_are_recorded_too(tmp_path: Path) -> None:
    tokens, recorded = array("q", [7] * 200), []
    recorder = Recorder(tmp_path / "t.jsonl", {}, FINGERPRINT)
    for content in (b"a", b"b"):
        ids = Marks(tokens, [Image(70, 130, content)]).ids(tokens)
        assert max(ids) >= FIRST_ID
        recorder.arrived(Serial(len(recorded)), Prefix(None, pack_tokens(ids)))
        recorded.append(pack_tokens(ids))
    recorder.close()
    told = events(tmp_path / "t.jsonl")
    assert [event["op"] for event in told if event["op"] != "block"] == [
        *("root", "arrive", "arrive", "end")
    ]
    paths = [base64.b64decode(event["tokens"]) for event in told if event["op"] == "block"]
    first, other = b"".join(paths[:4]), b"".join([paths[0], *paths[4:]])
    assert common_tokens(first, other) == common_tokens(*recorded) == 70
    assert all(0 <= token < 1 << 31 for token in _unpack(first + other))


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_no_token_or_namespace_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, {}, FINGERPRINT)
    secret = pack_tokens(list(range(40_000, 40_000 + 100)))
    recorder.arrived(Serial(0), Prefix("tenant-of-mallory", secret))
    recorder.close()
    assert "mallory" not in path.read_text()
    blocks = [event["tokens"] for event in events(path) if event["op"] == "block"]
    recorded = b"".join(map(base64.b64decode, blocks))
    assert len(recorded) == len(secret)
    ids = {secret[i : i + TOKEN_BYTES] for i in range(0, len(secret), TOKEN_BYTES)}
    assert not ids & {recorded[i : i + TOKEN_BYTES] for i in range(0, len(recorded), TOKEN_BYTES)}
    assert path.stat().st_mode & 0o077 == 0


def test_a_request_is_admitted_with_what_it_was_last_matched_with(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, {}, FINGERPRINT, clock=lambda: 5.0)
    one, other, unknown = Serial(0), Serial(1), Serial(2)
    recorder.arrived(one, Prefix(None, b""))
    recorder.arrived(other, Prefix(None, b""))
    recorder.matched(one, 64, 10)
    recorder.passed_over(one)
    recorder.passed_over(one)
    recorder.matched(one, 0, 70)
    recorder.matched(other, 1, 1)
    recorder.admitted(one, 60, 20)
    recorder.admitted(one, 60, 20)  # it decodes
    recorder.answered(one)
    recorder.answered(one)  # its second token
    recorder.arrived(one, Prefix(None, b""))  # it was retracted
    recorder.answered(one)
    recorder.gone(other)
    recorder.matched(unknown, 1, 1)  # of a self-test, which is nobody's load
    recorder.passed_over(unknown)
    recorder.admitted(unknown, 1, 1)
    recorder.answered(unknown)
    recorder.finished(unknown, Prefix(None, b""))
    recorder.gone(unknown)
    recorder.close()
    assert [event for event in events(path) if event["op"] not in ("root", "arrive")] == [
        {"op": "passed", "t": 0.0, "req": 0},
        {"op": "admit", "t": 0.0, "req": 0, "device": 0, "hit": 70, "restored": 60, "disk": 20},
        {"op": "first", "t": 0.0, "req": 0},
        {"op": "gone", "t": 0.0, "req": 1},
        {"op": "end", "t": 0.0},
    ]
    assert recorder.stats() == {"trace_events": 8, "trace_dropped": 0}


def test_a_writer_that_is_behind_costs_events_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    moving = threading.Event()
    recorder = Recorder(path, {}, FINGERPRINT, limit=3)
    write = recorder._writer._line
    monkeypatch.setattr(recorder._writer, "_line", lambda line: (moving.wait(), write(line)))
    nothing = Prefix(None, b"")
    for number in range(9):
        recorder.arrived(Serial(number), nothing)
    moving.set()
    until(lambda: not recorder._writer.queue)
    recorder.arrived(Serial(9), nothing)
    recorder.close()
    (gap,) = (place for place, event in enumerate(events(path)) if event["op"] == "lost")
    assert events(path)[gap] == {"op": "lost", "events": recorder.dropped}
    assert 5 <= recorder.dropped <= 6  # one may have been taken from the queue
    assert [event["req"] for event in events(path)[gap + 1 : -1]] == [9]


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        Recorder(path, {}, FINGERPRINT)
    assert path.read_text() == "mine"


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "trace", {}, FINGERPRINT)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), recorder._writer._file.fileno())
    recorder.arrived(Serial(0), Prefix(None, b""))
    until(lambda: recorder._writer.failed)
    recorder.arrived(Serial(1), Prefix(None, b""))
    recorder.close()
    assert recorder.dropped == 2 and "writing the trace failed" in caplog.text
    assert (tmp_path / "trace").read_bytes().count(b"\n") == 1
