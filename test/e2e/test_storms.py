"""Whole systems in storms: no wrong token, no lost request, no end of the server.

`python -m support.storms --seeds 0:1000` in test/ does the same and tells more.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from benchmark import ROOT
from sglang_hc.srt.tree.prompt_sources import PromptSources
from sglang_hc.store.executor import Completion
from sglang_hc.tiers.ledger import Ledger
from support import storm_actions, storm_engine, storm_events, storm_io, storms
from support.kv_events import MEDIA
from support.storm_actions import (
    Abort,
    Drain,
    Engine,
    Evict,
    Restart,
    Run,
    Send,
    Storm,
)
from support.storm_oracle import Oracle
from support.storm_plans import PAGES, storm_of
from support.storm_record import COUNTS, STATE_COUNT, Record, page_count

pytestmark = pytest.mark.long

RESULTS = ROOT / "benchmark" / "results"

QUICK = range(14)
NIGHTLY, TOGETHER = 1000, 20
KINDS = ("deepseek-v3.2", "gpt-oss-96", "gemma4", "qwen3-next", "granite-4", "kimi-linear")
"""One model of each kind of layers that is not plain full attention."""
EACH = 40
"""Storms of them each night."""


@pytest.fixture(scope="module")
def oracle(models: None, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracle = Oracle(tmp_path_factory.mktemp("oracle"))
    storms.learn(QUICK, oracle)
    return oracle


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What the storms before this test counted."""
    return Counter()


def check(seed: int, oracle: Oracle, seen: Counter[str], kind: str = "") -> None:
    storm = storm_of(seed, kind)
    report = storms.run(storm, oracle)
    seen.update(report.counts)
    assert not report.wrong, "\n".join([*report.wrong, storms.script(storm)])


@pytest.mark.parametrize("seed", QUICK)
def test_every_answer_is_right(oracle: Oracle, seen: Counter[str], seed: int) -> None:
    check(seed, oracle, seen)


def test_the_storms_were_storms(seen: Counter[str]) -> None:
    """What they are about happened in them."""
    if seen["storms"] != len(QUICK):
        pytest.skip("not all storms were seen")
    happened = "restored tokens", "disk tokens", "aborted", "retractions"
    for what in (*happened, *(f"hc told {medium}" for medium in MEDIA[:3])):
        assert seen[what] > 0, what


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK.stop, NIGHTLY, TOGETHER))
def test_a_thousand(oracle: Oracle, first: int) -> None:
    seeds = range(first, min(first + TOGETHER, NIGHTLY))
    storms.learn(seeds, oracle)
    for seed in seeds:
        check(seed, oracle, Counter())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layers(oracle: Oracle, tmp_path: Path, kind: str) -> None:
    """Of half of them nothing may be asked: twenty in a row may restore nothing from the shared
    directory."""
    record = Record(tmp_path / "storms.json")
    for seed in range(EACH):
        if seed % TOGETHER == 0:
            storms.learn(range(seed, seed + TOGETHER), oracle, kind)
        seen = Counter[str]()
        check(seed, oracle, seen, kind)
        record.add(kind, seed, seen, is_wrong=False)
    assert record.gaps(kind) == []


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_what_is_recorded_was_restored_from_each_tier_and_audited(kind: str) -> None:
    """And nothing was wrong."""
    record = Record(RESULTS / "cpu-storms.json")
    if record.storms(kind) < EACH:
        pytest.skip("so few that something may be missing by chance, or is still looked into")
    assert record.gaps(kind) == []


# -- what a storm finds ---------------------------------------------------------------------------


def test_a_lie_about_bytes_is_found(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a reply that are said to be in place and are not. Those of a prompt are copied
    without the executor."""

    def lie(executor: storm_io.LateExecutor, ticket: int, operation: object) -> Completion:
        return Completion(ticket, True)

    told = (
        *(Send("a", 3, new=24), Drain(settle=True), Evict()),
        *(Send("b", 3, turn=1, new=20), Drain()),
    )
    storm = Storm(Engine("hidden"), told)
    assert storms.run(storm, oracle).wrong == []
    monkeypatch.setattr(storm_io.LateExecutor, "_do", lie)
    (wrong,) = storms.run(storm, oracle).wrong
    assert "request 1" in wrong and "in place of" in wrong


def test_an_answer_that_never_comes_is_found(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits for the disk, which forgets what it was asked."""
    engine = Engine("kv", disk=True)
    saved = (Send("a", 1, new=20), Drain(settle=True), Restart(engine))
    storm = Storm(engine, (*saved, Send("b", 1, new=20), Drain()))
    report = storms.run(storm, oracle)
    assert report.wrong == [] and report.counts["disk tokens"] > 0
    monkeypatch.setattr(storm_io.LateDisk, "read", lambda *_: None)
    (wrong,) = storms.run(storm, oracle).wrong
    assert f"still busy after {storm_engine.PASSES} passes" in wrong


def test_a_request_that_is_lost_is_found(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the scheduler, and nobody aborted it."""
    storm = Storm(Engine("kv"), (Send("a", 1, new=20), Run(6), Abort("a"), Drain()))
    assert storms.run(storm, oracle).wrong == []
    monkeypatch.setattr(storm_engine.Player, "_is_over", lambda *_: True)  # so it is not noted
    (wrong,) = storms.run(storm, oracle).wrong
    assert "tokens of 20" in wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "name", "found"),
    [(Ledger, "_release", "of KV events: {'GPU'"), (PromptSources, "over", "do not add up")],
)
def test_what_is_not_told_is_found(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, part: type, name: str, found: str
) -> None:
    """To routers, that pages left; or to the operator, where a prompt came from."""
    told = Send("a", 1, new=20), Drain(settle=True), Evict(), Drain(settle=True)
    storm = Storm(Engine("kv", told=True), told)
    assert storms.run(storm, oracle).wrong == []
    monkeypatch.setattr(part, name, lambda *_: ())
    monkeypatch.setattr(storm_events, "LIMIT_S", 1.0)
    (wrong,) = storms.run(storm, oracle).wrong
    assert found in wrong


def test_a_record_leaves_out_what_it_has_but_for_what_was_wrong(tmp_path: Path) -> None:
    file, counts = tmp_path / "storms.json", Counter({"requests": 3})
    record = Record(file)
    for seed, is_wrong in ((0, False), (2, True), (1, False)):
        record.add("", seed, counts, is_wrong)
    assert Record(file).lacks("", range(4)) == [2, 3]
    assert Record(file).lacks("gpt-oss", range(2)) == [0, 1]
    Record(file).add("", 2, counts, False)
    (row,) = json.loads(file.read_text())["tables"]["storms"]["rows"]
    assert (row[1], row[3], row[-1]) == ("3", "9", "0")


def test_a_record_says_what_never_happened(tmp_path: Path) -> None:
    record, all_of_it = Record(tmp_path / "storms.json"), "gpt-oss-96"
    assert f"{all_of_it}: no hc audited_blocks" in record.gaps(all_of_it)
    happened = Counter(dict.fromkeys((*COUNTS, *map(page_count, PAGES)), 1))
    record.add(all_of_it, 0, happened, is_wrong=False)
    assert record.gaps(all_of_it) == []
    record.add(all_of_it, 1, happened, is_wrong=True)
    assert record.gaps(all_of_it) == [f"{all_of_it}: seed 1 was wrong"]
    record.add("qwen3-next", 0, happened - Counter({STATE_COUNT: 1}), is_wrong=False)
    assert record.gaps("qwen3-next") == [f"qwen3-next: no {STATE_COUNT}"]


def test_a_script_is_its_storm(capsys: pytest.CaptureFixture[str]) -> None:
    """All of a storm is in it."""
    kinds: set[type] = set()
    for seed in range(200):
        storm, found = storm_of(seed), []
        text = storms.script(storm).replace("from support.storms import repeat", "")
        exec(text, {"repeat": found.append})
        assert found == [storm]
        kinds |= {type(action) for action in storm.actions}
    assert kinds == set(get_args(storm_actions.Action))


def test_a_storm_is_the_same_each_time(oracle: Oracle) -> None:
    """To the pass."""
    first, second = (storms.run(storm_of(QUICK[0]), oracle) for _ in range(2))
    assert first.counts == second.counts
