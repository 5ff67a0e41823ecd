"""`python -m benchmark cliff` against fake servers, and what it asks of whom."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark import ROOT, cliff
from benchmark.__main__ import main
from benchmark.harness import cliff_report
from benchmark.harness.workload import ChatSpec, Distribution, synthetic_chat
from sglang_hc.tools.cli.bench import source_tree
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.workloads.sessions import Session, Workload

Start = Callable[..., Any]
TALK = ["--vocab-size", "1000", "--system-len", "8", "--turns", "3", "--input-len", "2"]
TALK += ["--output-len", "2", "--warmup", "0", "--host-size-gb", "1"]


def chats(sessions: int, turns: int) -> Workload:
    def fixed(value: int) -> Distribution:
        return Distribution("constant", (float(value),))

    spec = ChatSpec(sessions, fixed(turns), fixed(3), fixed(2), fixed(0), system_len=5)
    return synthetic_chat(spec, [1])


def spoken(session: Session) -> list[tuple[int, int]]:
    """All spans of a conversation, questions and answers."""
    return [tuple(part) for turn in session.turns for part in (*turn.said, turn.answer)]


@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 9))
def test_users_are_in_the_midst_of_the_same_conversations(
    users: int, turns: int, later: int
) -> None:
    """No word is lost, all turns are somebody's first one, and later conversations are whole."""
    before, after = chats(users + later, turns), cliff.in_midst(chats(users + later, turns), users)
    assert [spoken(s) for s in after.sessions] == [spoken(s) for s in before.sessions]
    left = [len(s.turns) for s in after.sessions]
    assert left[users:] == [turns] * later
    assert left[:users] == sorted(left[:users], reverse=True) and left[0] == turns
    if users >= turns:
        assert set(left[:users]) == set(range(1, turns + 1))


@given(st.floats(0.01, 1e4))
def test_the_sweep_doubles_until_it_is_past_the_pool(most: float) -> None:
    users = cliff.doubled(most)
    assert users[0] == 1 and all(b == 2 * a for a, b in itertools.pairwise(users))
    assert users[-1] >= most and (len(users) == 1 or users[-2] < most)


def test_two_servers_past_their_pools(fake_server: Start, tmp_path: Path) -> None:
    """The fake's pool has 60 tokens, and a conversation 16: 16 users are four times the pool's."""
    stock, other = fake_server(host_tier=False), fake_server()
    urls = ["--base-url", f"stock={stock.url}", "--base-url", f"kv={other.url}"]
    words = [*urls, *TALK, "--repeat", "2", "--window", "0.3", "--output", str(tmp_path)]
    assert main(["cliff", *words]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    values = [run["value"] for run in result["runs"] if run["arm"] == "kv"]
    assert values == [1, 2, 4, 8, 16] * 2
    begins = [(run["arm"], run["repeat"]) for run in result["runs"] if run["value"] == 16]
    assert begins == [("stock", 0), ("kv", 0), ("kv", 1), ("stock", 1)]
    for run in result["runs"]:
        assert 0 < run["summary"]["duration"] <= 0.3 and run["summary"]["total_requests"] > 0
    rows = cliff_report.table(result).rows
    assert len(rows) == 10 and rows[-1][:2] == ("16 (4.3)", "kv")
    assert {row[7] for row in rows if row[1] == "stock"} == {"0%"}  # from a host tier
    assert all(row[7] != "0%" for row in rows if row[1] == "kv")
    assert (tmp_path / "cliff.png").stat().st_size > 0


def planted(arm: str, users: int, repeat: int, rate: float) -> dict[str, Any]:
    summary = {
        **{"output_token_throughput": rate, "median_ttft": 0.5, "p90_ttft": 1.5},
        **{"hits": {"device": 10, "host": 30}, "cache_hit_rate": 0.4},
        **{"average_prompt_len": 10.0, "total_requests": 10},
    }
    return {"arm": arm, "value": users, "repeat": repeat, "summary": summary}


def test_what_is_left_is_of_the_arms_own_peak_in_the_same_repeat() -> None:
    rates = {("a", 1): (10, 20), ("a", 2): (40, 30), ("a", 4): (10, 15), ("b", 1): (5, 5)}
    rates |= {("b", 2): (8, 10), ("b", 4): (8, 9)}
    result = {
        "settings": {"pool_tokens": 300, "conversation_tokens": 150.0},
        "arms": [{"name": "a"}, {"name": "b"}],
        "points": [{"value": 1}, {"value": 2}, {"value": 4}],
        "runs": [
            planted(arm, users, repeat, rate)
            for (arm, users), both in rates.items()
            for repeat, rate in enumerate(both)
        ],
    }
    assert cliff_report.sentence(result) == (
        "With 4 conversations, tokens/s of the arm's own peak: a 0.38 (0.25 to 0.50), "
        "b 0.95 (0.90 to 1.00)."
    )
    shown = ("4 (2.0)", "a", "12.5", "0.38", "500.0 ms", "1.50 s", "10%", "30%", "0%", "60%")
    assert cliff_report.table(result).rows[-2] == shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--window", "0"], "--window must be positive"),
        (["--past", "0.5"], "--past must be from 1"),
        (["--turns", "0"], "--turns must be at least 1"),
        (["--think", "-1"], "--think must not be negative"),
        (["--base-url", "URL", "--system-len", "900"], "give a smaller --system-len"),
        (["--base-url", "URL", "--window", "1e-9"], "give a longer --window"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], message: str, fake_server: Start, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    words = [fake_server().url if word == "URL" else word for word in words]
    assert main(["cliff", *TALK, *words, "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert error.count("benchmark cliff: ") == 1


def test_the_command_is_the_benchmark_of_the_source_tree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sglang_hc.tools.cli.main", "bench", "cliff", "--past", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("benchmark cliff: --past must be")
    assert source_tree(ROOT / "python" / "sglang_hc") == ROOT
    with pytest.raises(UsageError, match="make setup"):
        source_tree(tmp_path / "site-packages" / "sglang_hc")
