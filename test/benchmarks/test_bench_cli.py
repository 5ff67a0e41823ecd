"""Whole benchmarks through the command line, against fake servers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark.__main__ import main
from benchmark.harness import arms, report
from benchmark.long_context import Documents

Start = Callable[..., Any]
CHAT = ["--vocab-size", "1000", "--sessions", "3", "--turns", "3", "--input-len", "6"]
CHAT += ["--output-len", "3", "--warmup", "1"]


def bench(*words: str) -> int:
    return main(words)


def result_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return loaded


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1000, "eos_token_id": [1, 2]}))
    return str(folder)


@pytest.fixture
def own_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms start the fake instead of a real launcher."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(arms, "HC_MODULE", "support.fake_sglang")
    monkeypatch.setattr(arms.machine, "has_gpu", lambda: False)


def test_two_running_servers_are_compared(
    fake_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock, other = fake_server(), fake_server()
    output = tmp_path / "out"
    urls = ["--base-url", f"stock={stock.url}", "--base-url", f"kv={other.url}"]
    assert bench("multi-turn", *urls, *CHAT, "--repeat", "2", "--output", str(output)) == 0
    result = result_of(output)
    assert [run["arm"] for run in result["runs"]] == ["stock", "kv", "kv", "stock"]
    assert result["agreement"][0] == {
        **result["agreement"][0],
        "compared": 18,
        "equal": 18,
        "verdict": "equal",
    }
    turn_2 = result["runs"][0]["groups"]["turn 2"]
    assert turn_2["requests"] == 3 and turn_2["hits"]["host"] > 0
    assert len(stock.paths("/flush_cache")) == 2
    first, second = report.overview_table(result).rows
    assert first[:2] == ("rate=inf", "stock") and first[4] == "-" and first[-1] == "reference"
    assert second[1] == "kv" and float(second[4]) > 0 and second[-1] == "equal"
    assert second[5] == f"{result['runs'][1]['groups']['turns 1+']['cache_hit_rate']:.0%}"
    requests = (output / "requests.jsonl").read_text().splitlines()
    assert len(requests) == 4 * 9
    page = (output / "report.html").read_text()
    assert page.count("data:image/png;base64") == 3
    assert "Where the tier does not pay" in page and result["machine"]["cpu"] in page
    assert not re.search(r'(src|href)="(?!data:)', page), "the report must be self-contained"
    assert "Time to first token" in capsys.readouterr().out


def test_repeats_ask_different_things_and_arms_the_same(fake_server: Start, tmp_path: Path) -> None:
    stock, other = fake_server(), fake_server()
    urls = ["--base-url", f"a={stock.url}", "--base-url", f"b={other.url}"]
    bench(
        "multi-turn", *urls, *CHAT, "--repeat", "2", "--rates", "50,inf", "--output", str(tmp_path)
    )
    asked = [
        sorted(tuple(body["input_ids"]) for body in s.paths("/generate")) for s in (stock, other)
    ]
    rates = [run["summary"]["request_rate"] for run in result_of(tmp_path)["runs"]]
    assert sorted(rates) == [0, 0, 0, 0, 50, 50, 50, 50]  # 0: all at once
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == len(asked[0]) == 1 + 4 * 9


@pytest.mark.usefixtures("own_servers")
@pytest.mark.parametrize("servers", ["turns", "together"])
def test_arms_are_started_and_stopped(
    model: str, tmp_path: Path, servers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = ["--model", model, "--arms", "stock,hicache,hidden:8+kv:4", "--servers", servers]
    words += ["--max-total-tokens", "99", "--arm-args", "stock=--mine 1", "--server-args=--every 2"]
    assert bench("multi-turn", *words, *CHAT, "--repeat", "2", "--output", str(output)) == 0
    result = result_of(output)
    assert [arm["name"] for arm in result["arms"]] == ["stock", "hidden:8+kv:4"]
    assert "without a GPU" in result["skipped"][0]
    assert len(result["arms"][0]["start_s"]) == (2 if servers == "turns" else 1)
    stock = (output / "logs" / "stock.log").read_text()
    plan = (output / "logs" / "hidden-8+kv-4.log").read_text()
    assert "--hc-disable" in stock and "--mine 1" in stock and "--every 2" in stock
    assert "--hc-forms hidden:8,kv:4 --hc-host-size-gb 4" in plan and "--mine" not in plan
    assert "--max-total-tokens 99" in plan and "--sleep-on-idle" in plan
    assert "without a GPU" in capsys.readouterr().out


@pytest.mark.usefixtures("own_servers")
def test_with_a_gpu_stock_and_hicache_are_sglang_as_it_comes(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "SGLANG_MODULE", "support.fake_sglang")
    monkeypatch.setattr(arms.machine, "has_gpu", lambda: True)
    names = "stock,hicache,hicache-direct,auto"
    words = ["--model", model, "--arms", names, "--arm-args", "hicache=--page-size 64"]
    words += ["--host-size-gb", "8", "--no-compare", "--rates", "50,100", "--repeat", "1"]
    # Answers that differ are not looked at with --no-compare.
    words += ["--arm-args", "auto=--fake-disagree-after 12"]
    assert bench("multi-turn", *words, *CHAT, "--output", str(tmp_path)) == 0
    result = result_of(tmp_path)
    commands = {arm["name"]: arm["command"] for arm in result["arms"]}
    plain = "SGLANG_PLUGINS=none python -m support.fake_sglang"
    hicache = "--enable-hierarchical-cache --hicache-size 9 --hicache-write-policy write_through"
    assert commands["stock"].startswith(plain) and "--hc" not in commands["stock"]
    assert commands["hicache"].startswith(plain) and hicache in commands["hicache"]
    assert commands["hicache"].endswith("--page-size 64")
    assert commands["hicache-direct"].endswith("--hicache-io-backend direct")
    assert "SGLANG_PLUGINS" not in commands["auto"]
    assert result["agreement"] == []
    compared = {(row["arm"], row["against"]) for row in result["ratios"]}
    ours = {("auto", name) for name in ("stock", "hicache", "hicache-direct")}
    assert compared == ours | {("hicache", "stock"), ("hicache-direct", "stock")}
    page = (tmp_path / "report.html").read_text()
    assert "Against stock (above 1 is better)" in page
    assert "Against hicache (above 1 is better)" in page


@pytest.mark.usefixtures("own_servers")
@pytest.mark.parametrize(("margin", "status"), [("0.0001", 0), ("0.5", 1)])
def test_a_wrong_arm_is_found_and_its_margin_asked(
    model: str, tmp_path: Path, margin: str, status: int
) -> None:
    words = ["--model", model, "--arms", "stock,kv", "--output", str(tmp_path / "out")]
    words += [
        "--arm-args",
        "kv=--fake-disagree-after 12",
        "--arm-args",
        f"stock=--fake-margin {margin}",
    ]
    assert bench("multi-turn", *words, *CHAT, "--repeat", "1") == status
    (agreement,) = result_of(tmp_path / "out")["agreement"]
    assert len(agreement["disagreements"]) == 3
    first = agreement["disagreements"][0]
    assert (first["turn"], first["position"]) == (1, 0)
    assert first["margin"] == pytest.approx(float(margin))
    assert first["explained"] is (status == 0)
    assert ("near ties" in agreement["verdict"]) is (status == 0)
    assert agreement["after"] == 3


@pytest.mark.usefixtures("own_servers")
def test_a_server_that_does_not_start_is_one_message(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", model, "--arms", "stock", "--server-args=--fake-die"]
    assert bench("multi-turn", *words, *CHAT, "--output", str(tmp_path / "out")) == 2
    message = capsys.readouterr().err
    assert "arm stock did not start" in message and "the fake refuses to start" in message


def test_a_sweep_of_concurrent_users(fake_server: Start, tmp_path: Path) -> None:
    words = ["--base-url", fake_server().url, "--concurrency", "1,3"]
    assert bench("multi-turn", *words, *CHAT, "--repeat", "1", "--output", str(tmp_path)) == 0
    result = result_of(tmp_path)
    assert [(run["value"], run["summary"]["request_rate"]) for run in result["runs"]] == [
        (1, 0.0),
        (3, 0.0),
    ]


def test_a_trace_file_with_its_own_times(fake_server: Start, tmp_path: Path) -> None:
    rows = [
        {"timestamp": t, "input_length": 600, "output_length": 2, "hash_ids": [1, t]}
        for t in (10, 20, 30)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    fake = fake_server()
    words = ["--base-url", fake.url, "--vocab-size", "1000", "--dataset", str(trace)]
    words += ["--repeat", "1", "--warmup", "0", "--output", str(tmp_path / "out")]
    assert bench("multi-turn", *words) == 0
    assert [len(body["input_ids"]) for body in fake.paths("/generate")] == [600] * 3
    assert bench("multi-turn", *words, "--rates", "1") == 2


def test_long_context_reads_first_and_measures_gain_by_hit_rate(
    fake_server: Start, tmp_path: Path
) -> None:
    stock, other = fake_server(), fake_server()
    words = ["--base-url", f"stock={stock.url}", "--base-url", f"kv={other.url}", "--repeat", "1"]
    words += ["--vocab-size", "1000", "--scale", "0.003", "--contexts", "3", "--requests", "5"]
    words += ["--tasks", "gsm100,mixed", "--zipf", "0,2", "--output", str(tmp_path)]
    assert bench("long-context", *words) == 0
    result = result_of(tmp_path)
    runs = {run["point"]: run for run in result["runs"] if run["arm"] == "stock"}
    assert runs["gsm100"]["summary"]["total_requests"] == 3
    assert runs["zipf=2"]["summary"]["total_requests"] == 5
    # The fake never forgets: every question finds its document.
    assert runs["zipf=0"]["groups"]["zipf=0"]["cache_hit_rate"] > 0.8
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert {"gain_by_hit_rate", "ttft_by_value", "ttft_by_group", "ttft_cdf"} <= drawn
    gains = {row["value"]: row for row in report.gains(result)}
    assert set(gains) == {0, 2} and {row["arm"] for row in gains.values()} == {"kv"}
    group = {run["arm"]: run["groups"]["zipf=2"] for run in result["runs"] if run["value"] == 2}
    better = group["stock"]["average_ttft"] / group["kv"]["average_ttft"]
    assert gains[2]["better"] == pytest.approx(better)
    assert gains[2]["device_hit_rate"] == group["stock"]["device_hit_rate"]


def test_growing_skew_asks_more_for_the_popular_documents() -> None:
    chance = np.random.default_rng(1).random(400)
    repeated = []
    for skew in (0.0, 0.5, 1.0, 2.0):
        (session,) = Documents(8, 0.01).by_zipf(skew, chance).sessions
        read = [turn.said[0] for turn in session.turns if not turn.measured]
        asked = [turn.said[0] for turn in session.turns if turn.measured]
        counts = [asked.count(text) for text in read]
        assert sum(counts) == len(chance)
        repeated.append(counts[0])
    assert repeated == sorted(repeated) and repeated[-1] > 2 * repeated[0]


def test_overhead_never_repeats_a_prompt(fake_server: Start, tmp_path: Path) -> None:
    fake = fake_server()
    words = ["--base-url", fake.url, "--vocab-size", "1000", "--decode-heavy", "4:6"]
    words += ["--prefill-heavy", "9:1", "--batches", "1,2", "--requests", "2", "--repeat", "2"]
    assert bench("overhead", *words, "--warmup", "0", "--output", str(tmp_path)) == 0
    asked = [tuple(body["input_ids"]) for body in fake.paths("/generate")]
    assert len(asked) == len(set(asked)) == 2 * (2 + 4 + 2 + 4)
    points = [point["name"] for point in result_of(tmp_path)["points"]]
    assert points[0] == "decode-heavy batch=1" and points[-1] == "prefill-heavy batch=2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["multi-turn"], "--model is needed"),
        (["multi-turn", "--model", "/no/such"], "no such folder"),
        (["multi-turn", "--model", "MODEL", "--arms", "fast"], "'fast' is no arm"),
        (["multi-turn", "--model", "MODEL", "--arms", "kv,kv"], "named twice"),
        (["multi-turn", "--model", "MODEL", "--arms", "hicache"], "nothing is left"),
        (["multi-turn", "--model", "MODEL", "--arms", "kv", "--arm-args", "kv"], "ARM=FLAGS"),
        (["multi-turn", "--model", "MODEL", "--arms", "kv", "--arm-args", "x=-y"], "no such arm"),
        (["multi-turn", "--model", "MODEL", "--arms", "kv", "--turns", "x:1"], "--turns"),
        (["multi-turn", "--model", "MODEL", "--arms", "kv", "--rates", "1,1"], "--rates"),
        (["multi-turn", "--model", "MODEL", "--arms", "kv", "--concurrency", "1.5"], "whole"),
        (["multi-turn", "--model", "MODEL", "--dataset", "x:y"], "No such file"),
        (["multi-turn", "--model", "MODEL", "--sessions", "0"], "--sessions"),
        (["multi-turn", "--rates", "1", "--concurrency", "1"], "two sweeps"),
        (["multi-turn", "--base-url", "http://127.0.0.1:9", "--arms", "kv"], "leave out --arms"),
        (["multi-turn", "--base-url", "127.0.0.1:9"], "http://HOST:PORT"),
        (["multi-turn", "--base-url", "http://127.0.0.1:9"], "no server answers"),
        (["multi-turn", "--request-timeout", "0"], "--request-timeout"),
        (["multi-turn", "--host-size-gb", "-1"], "--host-size-gb"),
        (["multi-turn", "--seed", "-1"], "--seed"),
        (["long-context", "--tasks", "poems"], "--tasks"),
        (["long-context", "--zipf", "-1"], "--zipf"),
        (["long-context", "--tasks", "", "--zipf", ""], "both empty"),
        (["overhead", "--batches", "0"], "--batches"),
        (["overhead", "--decode-heavy", "5"], "IN:OUT"),
        (["multi-turn", "--model", "MODEL", "--output", "model/config.json"], "--output"),
    ],
)
def test_a_mistake_is_one_clear_message(
    words: list[str],
    message: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arms.machine, "has_gpu", lambda: False)
    monkeypatch.chdir(Path(model).parent)
    assert bench(*(model if word == "MODEL" else word for word in words)) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_the_arm_with_sglangs_attention_is_stock_with_a_gpu() -> None:
    settings = arms.ServerSettings("MODEL", 1.0)
    names = ["stock", arms.SGLANGS_ATTENTION]
    (stock, other), skipped = arms.make_arms(names, settings, gpu=False)
    assert (other.module, other.args) == (stock.module, stock.args) and not skipped
    assert other.env == {arms.SGLANGS_ATTENTION_ENV: "1"} and not stock.env
    made, (skip,) = arms.make_arms(names, settings, gpu=True)
    assert [arm.name for arm in made] == ["stock"] and "stock-attention: left out" in skip
