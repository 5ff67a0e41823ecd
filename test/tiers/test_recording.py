"""A recorded host tier, replayed by the simulator: equal unless something was changed."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.eviction import make_policy
from sglang_hc.policy.pins import PinLimitError, SessionPins, TimeToLive
from sglang_hc.queue.requests import Serial
from sglang_hc.tiers import trace
from sglang_hc.tiers.recording import Recorder, RecordingHostTier, RecordingLookAhead
from sglang_hc.tools.cli.main import main
from sglang_hc.tools.simulator.recorded import replay_record
from sglang_hc.tools.workloads.traces import TraceError
from sglang_hc.tree.block_tree import BlockNode, BlockTree
from sglang_hc.tree.identity import TOKEN_BYTES, Prefix, pack_tokens
from support.host import FINGERPRINT, keep

SLOTS = 12


class Server:
    """A recorded tier, used as a server uses it: short prompts over few tokens, so paths share."""

    def __init__(self, path: Path, seed: int, eviction: str = "queue", limit: int = 10**6) -> None:
        self.rng = random.Random(seed)
        header = {"host_slots": SLOTS, "eviction": eviction, "page_size": 1}
        self.recorder = Recorder(path, header, FINGERPRINT, limit)
        self.pins = SessionPins(6, 60.0)
        ttl: TimeToLive[BlockNode] = TimeToLive(40.0)
        blocks = BlockTree(FINGERPRINT)
        self.window = RecordingLookAhead(self.recorder)
        policy = make_policy(eviction, self.window, pinned=self.pins)
        self.tier = RecordingHostTier(self.recorder, blocks, SLOTS, policy, ttl)
        self.recorder.watch(self.pins)
        self.waiting: dict[Serial, Prefix] = {}
        self.hits = 0
        self.count = 0
        self.now = 0.0

    def prompt(self) -> Prefix:
        blocks = [[self.rng.randrange(2)] * BLOCK_TOKENS for _ in range(self.rng.randint(0, 3))]
        tail = [self.rng.randrange(2) for _ in range(self.rng.randint(1, BLOCK_TOKENS))]
        tokens = [token for block in [*blocks, tail] for token in block]
        return Prefix(self.rng.choice([None, "tenant"]), pack_tokens(tokens))

    def arrive(self) -> None:
        request = Serial(self.count)
        self.count += 1
        self.waiting[request] = self.prompt()
        self.recorder.arrived(request, self.waiting[request])

    def look(self) -> None:
        order = list(self.waiting)
        if self.rng.random() < 0.3:
            self.rng.shuffle(order)
        self.window.update(order, 4, lambda request: self.ids(self.waiting[request]))

    def ids(self, prompt: Prefix) -> list[bytes]:
        nodes = self.tier.tree.match(prompt).nodes
        return list(dict.fromkeys(node.block_id for node in nodes))

    def abort(self) -> None:
        request = self.rng.choice(list(self.waiting))
        del self.waiting[request]
        self.window.leave(request)
        self.recorder.gone(request)

    def serve(self) -> None:
        request = next(iter(self.waiting))
        prompt = self.waiting.pop(request)
        match = self.tier.tree.match(prompt)
        usable = match.tokens if all(node.ready for node in match.nodes) else 0
        if usable == match.tokens:
            self.recorder.matched(request, prompt.num_tokens, 0, usable)
            self.recorder.admitted(request, usable, 0)
            self.hits += usable
        rank = self.window.rank(request)

        def is_protected(node) -> bool:
            use = self.window.next_use(node.block_id)
            return rank is not None and use is not None and use < rank

        self.tier.pin(match.nodes)
        keep(self.tier, prompt.tokens, prompt.namespace, self.now, is_protected)
        self.tier.access(self.tier.tree.match(prompt).nodes, self.now)
        self.tier.unpin(match.nodes)
        self.recorder.finished(request, prompt)

    def pin(self) -> None:
        """A session keeps its blocks for a while."""
        prompt = self.prompt()
        with contextlib.suppress(PinLimitError):
            ids = self.ids(prompt)
            self.pins.pin(prompt.namespace, f"s{self.rng.randrange(3)}", ids, 20.0, self.now)

    def run(self, steps: int = 300) -> Server:
        for _ in range(steps):
            self.now += 1
            self.look()
            self.pins.expire(self.now)
            self.tier.expire(self.now)
            if self.rng.random() < 0.1:
                self.pin()
            choice = self.rng.random()
            if choice < 0.5 or not self.waiting:
                self.arrive()
            elif choice < 0.93:
                self.serve()
            elif choice < 0.97:
                self.abort()
            elif choice < 0.99:
                self.tier.evict(2, self.now)
            else:
                self.tier.clear()
        self.tier.check_integrity()
        self.recorder.close()
        return self


@pytest.mark.parametrize("eviction", ["queue", "lru", "fifo", "lfu"])
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


@pytest.mark.parametrize("other", ["lru", "fifo", "lfu"])
def test_another_policy_is_noticed(tmp_path: Path, other: str, capsys) -> None:
    path = tmp_path / "t.jsonl"
    Server(path, 1).run()
    path.write_text(path.read_text().replace('"eviction":"queue"', f'"eviction":"{other}"'))
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
