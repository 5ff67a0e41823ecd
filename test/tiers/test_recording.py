"""A recorded host tier, replayed by the simulator: equal unless something was changed."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.requests import Serial
from sglang_hc.tiers import trace
from sglang_hc.tiers.recording import Recorder
from sglang_hc.tools.cli.main import main
from sglang_hc.tools.simulator.recorded import replay_record
from sglang_hc.tools.workloads.traces import TraceError
from sglang_hc.tree.identity import TOKEN_BYTES, Prefix, pack_tokens
from support.host import FINGERPRINT
from support.recorded_server import Server


@pytest.mark.parametrize("eviction", ["queue", "lru"])
@pytest.mark.parametrize("seed", range(3))
def test_the_replay_gives_the_same_hits_and_evictions(
    tmp_path: Path, eviction: str, seed: int
) -> None:
    path = tmp_path / "t.jsonl"
    server = Server(path, seed, eviction).run()
    comparison = replay_record(path)
    assert comparison.difference is None and comparison.whole
    assert comparison.hit_tokens == server.hits > 0
    assert comparison.evictions == server.tier.evicted_blocks > 20


def test_another_policy_is_noticed(tmp_path: Path, capsys) -> None:
    path = tmp_path / "t.jsonl"
    Server(path, 1).run()
    path.write_text(path.read_text().replace('"eviction":"queue"', '"eviction":"lru"'))
    comparison = replay_record(path)
    assert comparison.difference is not None
    assert comparison.difference.recorded != comparison.difference.replayed
    assert main(["replay", str(path)]) == 1
    assert f"DIFFERENT from line {comparison.difference.line} on" in capsys.readouterr().out


@pytest.mark.parametrize(("op", "field"), [("admit", "hit"), ("stage", "slot")])
def test_a_changed_outcome_is_noticed(tmp_path: Path, op: str, field: str) -> None:
    path = tmp_path / "t.jsonl"
    Server(path, 1).run()
    lines = path.read_text().splitlines(keepends=True)
    at = max(i for i, line in enumerate(lines) if f'"op":"{op}"' in line)
    event = json.loads(lines[at])
    event[field] = (event[field] or 0) + 1
    lines[at] = json.dumps(event) + "\n"
    path.write_text("".join(lines))
    comparison = replay_record(path)
    assert comparison.difference is not None and comparison.difference.line == at + 1


def test_no_token_or_namespace_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, {}, FINGERPRINT)
    secret = pack_tokens(list(range(40_000, 40_000 + 100)))
    recorder.arrived(Serial(0), Prefix("tenant-of-mallory", secret))
    recorder.close()
    text = path.read_text()
    assert "mallory" not in text
    events = [json.loads(line) for line in text.splitlines()]
    blocks = [event["tokens"] for event in events if event.get("op") == "block"]
    recorded = b"".join(map(base64.b64decode, blocks))
    assert len(recorded) == len(secret)
    ids = {secret[i : i + TOKEN_BYTES] for i in range(0, len(secret), TOKEN_BYTES)}
    assert not ids & {recorded[i : i + TOKEN_BYTES] for i in range(0, len(recorded), TOKEN_BYTES)}
    assert path.stat().st_mode & 0o077 == 0


def before_writes(monkeypatch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
    """Traces are opened such that every write to their files comes after `step`."""

    def opened(*args: Any, **kwargs: Any) -> SimpleNamespace:
        file = open(*args, **kwargs)  # noqa: SIM115 (the writer closes it)
        write = lambda data: (step(), file.write(data))  # noqa: E731
        return SimpleNamespace(write=write, flush=file.flush, close=file.close)

    monkeypatch.setattr(trace, "open", opened, raising=False)


def test_a_writer_that_is_behind_costs_events_and_says_where(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "t.jsonl"
    moving = threading.Event()
    moving.set()
    before_writes(monkeypatch, moving.wait)
    server = Server(path, 2, limit=150)
    moving.clear()
    threading.Timer(0.5, moving.set).start()
    server.run(400)
    assert server.recorder.dropped > 0
    assert server.recorder.stats()["trace_dropped"] == server.recorder.dropped
    comparison = replay_record(path)
    assert comparison.difference is None and not comparison.equal
    assert comparison.lost_line is not None
    assert main(["replay", str(path)]) == 1


def test_a_file_that_cannot_be_written_ends_the_record_only(tmp_path: Path, monkeypatch) -> None:
    is_full = False

    def check_space() -> None:
        if is_full:
            raise OSError(28, "No space left on device")

    before_writes(monkeypatch, check_space)
    server = Server(tmp_path / "t.jsonl", 2)
    is_full = True
    server.run()
    before = server.recorder.dropped
    server.recorder.gone(Serial(0))
    assert server.recorder.dropped == before + 1


def test_a_file_cut_off_in_a_line_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    Server(path, 1).run()
    text = path.read_text()
    path.write_text(text[: len(text) * 2 // 3])
    comparison = replay_record(path)
    assert comparison.equal and not comparison.whole and comparison.evictions > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a record"),
        ('{"timestamp": 0}\n', "not a record"),
        ('{"trace":"sglang-hc","version":99}\n', "version 99"),
        ('{"trace":"sglang-hc","version":1,"eviction":"best"}\n', "unknown eviction"),
        ("{]\n", "not JSON"),
    ],
)
def test_other_files_are_refused_in_one_line(
    tmp_path: Path, text: str, message: str, capsys
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        replay_record(path)
    assert main(["replay", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_event_out_of_place_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    Recorder(path, {"host_slots": 2, "eviction": "lru", "page_size": 1}, FINGERPRINT).close()
    with path.open("a") as file:
        file.write('{"op":"ready","slot":1}\n')
    with pytest.raises(TraceError, match=":3: does not follow"):
        replay_record(path)


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        Recorder(path, {}, FINGERPRINT)
    assert path.read_text() == "mine"


def test_a_block_that_is_needed_before_it_came_by_can_still_be_stored(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    server = Server(path, 1)
    tokens = pack_tokens([1] * BLOCK_TOKENS)
    identity = server.tier.tree.identities(Prefix(None, tokens))[0]
    server.window.update([Serial(0)], 4, lambda request: [identity])
    slot = server.tier.stage(0.0)
    assert slot is not None
    server.tier.publish(server.tier.tree.root(None), tokens, slot, 0.0)
    server.recorder.close()
    comparison = replay_record(path)
    assert comparison.equal and comparison.whole
