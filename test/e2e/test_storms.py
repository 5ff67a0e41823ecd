"""Whole systems in storms: no wrong token, no lost request, no end of the server.

`python -m support.storms --seeds 0:1000` in test/ does the same and tells more.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from sglang_hc.store.executor import Completion
from support import storm_actions, storm_engine, storm_io, storms
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
from support.storm_plans import storm_of
from support.storm_record import Record

pytestmark = pytest.mark.long

QUICK = range(14)
NIGHTLY, TOGETHER = 1000, 20
KINDS = {"gpt-oss-96": 100, "gemma4": 20, "qwen3-next": 60, "granite-4": 20, "deepseek-v3.2": 40}
"""Storms each night of models whose layers do not all have plain full attention."""


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
    for what in ("restored tokens", "stored tokens", "aborted", "retractions"):
        assert seen[what] > 0, what


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK.stop, NIGHTLY, TOGETHER))
def test_a_thousand(oracle: Oracle, first: int) -> None:
    seeds = range(first, min(first + TOGETHER, NIGHTLY))
    storms.learn(seeds, oracle)
    for seed in seeds:
        check(seed, oracle, Counter())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first"),
    [(kind, first) for kind, count in KINDS.items() for first in range(0, count, TOGETHER)],
)
def test_every_kind_of_layers(oracle: Oracle, kind: str, first: int) -> None:
    seeds = range(first, first + TOGETHER)
    storms.learn(seeds, oracle, kind)
    seen = Counter[str]()
    for seed in seeds:
        check(seed, oracle, seen, kind)
    assert seen["restored tokens"] > 0 and seen["hc audited_blocks"] > 0


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
    assert report.wrong == [] and report.counts["stored tokens"] > 0
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
