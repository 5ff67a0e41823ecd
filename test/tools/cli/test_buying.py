"""`sglang-hc capacity --ttft-p90`: what to buy, as a user meets it."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hc.tools.cli import buying
from sglang_hc.tools.cli.main import main
from sglang_hc.tools.simulator import report
from sglang_hc.tools.simulator.buying import SMALLEST_BLOCKS
from sglang_hc.tools.simulator.models import load_model
from sglang_hc.tools.simulator.run import Setup

SAMPLES = Path(__file__).parents[3] / "benchmark" / "simulator" / "samples"
SMALL = ["--workload", "attentionstore", "--sessions", "12", "--model", "llama-13b"]
BUY = ["--workload", "attentionstore", "--sessions", "40", "--model", "llama-13b", "--rate", "0.2"]
BUY += ["--think", "5", "--gpu-tflops", "15", "--output-cap", "4"]


@pytest.mark.long
def test_what_to_buy_is_small_enough_and_confirmed(capsys, tmp_path):
    """Ranked by cost; a size a tenth smaller misses the target; `simulate` says the same."""
    page = tmp_path / "report.html"
    words = [*BUY, "--ttft-p90", "23", "--forms", "kv,hidden", "--report", str(page)]
    assert main(["capacity", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = answer["rows"]
    assert {row["form"] for row in rows} == {"none", "kv", "hidden"} and len(rows) == 5
    meeting = [row["cost_per_million_tokens"] for row in rows if row["meets"]]
    assert meeting == sorted(meeting) and 0 < len(meeting) < 5
    assert any(not row["ssd_gb"] for row in rows if row["form"] == "kv")
    best = rows[0]

    def p90(dram):
        sizes = ["--dram-gb", str(dram), "--disk-gb", str(best["ssd_gb"])]
        assert main(["simulate", *BUY, "--forms", best["form"], *sizes, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["ttft_p90"]

    assert p90(best["dram_gb"]) == pytest.approx(best["p90"], rel=0.01) and best["p90"] <= 23
    assert p90(best["dram_gb"] / 1.1) > 23
    text = page.read_text()
    assert answer["says"] in text and "data:image/png;base64" in text


def test_auto_is_what_a_server_with_these_tiers_chooses(capsys):
    """Beside a fast disk it keeps all layers, without it computes some again; forms with one plan
    have one row's numbers."""
    load = [*SMALL, "--sessions", "3", "--gpu", "H100", "--disk-gbps", "50"]
    assert main(["capacity", *load, "--forms", "auto,hidden", "--ttft-p90", "9", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    ways = {(row.pop("form"), row["ssd_gb"] > 0): row for row in rows}
    plans = {way: row["layer_plan"] for way, row in ways.items()}
    assert plans["auto", False] == "recompute:3,hidden:37"
    assert plans["auto", True] == plans["hidden", True] == plans["hidden", False] == "hidden:40"
    assert ways["auto", True] == ways["hidden", True] != ways["hidden", False]
    for (form, _), row in ways.items():
        sizes = ["--dram-gb", str(row["dram_gb"]), "--disk-gb", str(row["ssd_gb"])]
        kept = ["--policy", "none"] if form == "none" else ["--forms", form]
        assert main(["simulate", *load, *kept, *sizes, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["ttft_p90"], data["restored_share"]) == (row["p90"], row["restored_share"])


@pytest.mark.slow
def test_sizes_for_the_mooncake_sample_are_within_a_tenth_of_the_smallest(capsys):
    """Whatever is smaller by more than that misses the target, in DRAM or on the SSD, down to the
    smallest tiers that are looked at."""
    trace = str(SAMPLES / "mooncake.jsonl")
    load = ["--workload", trace, "--model", "llama-13b", "--context", "16384", "--forms", "hidden"]
    assert main(["capacity", *load, "--ttft-p90", "0.75", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]

    def p90(dram, ssd):
        sizes = ["--dram-gb", str(dram), "--disk-gb", str(ssd)]
        assert main(["simulate", *load, *sizes, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["ttft_p90"]

    least = SMALLEST_BLOCKS * load_model("llama-13b", "hidden").slot_bytes / 1e9
    assert rows[0]["meets"]
    for row in rows:
        if not row["meets"]:
            continue
        dram, ssd = row["dram_gb"], row["ssd_gb"]
        assert p90(dram, ssd) == pytest.approx(row["p90"], rel=0.01)
        for step in range(20):
            less = 1.1 * 1.05**step
            assert dram / less < least or p90(dram / less, ssd) > 0.75
            assert ssd / less < least or p90(dram, ssd / less) > 0.75


@pytest.mark.slow
@pytest.mark.parametrize(("tflops", "target", "at_least"), [("15", 23, True), ("14", 25, False)])
def test_the_error_of_a_sample_is_said(capsys, monkeypatch, tflops, target, at_least):
    """What the first part of a load needs is a third too much for all of it, at least; with slower
    GPUs it is nearly right."""
    monkeypatch.setattr(buying, "SAMPLE_TURNS", 150)
    load = [*BUY, "--gpu-tflops", tflops, "--forms", "kv"]
    assert main(["capacity", *load, "--ttft-p90", str(target), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["searched_turns"] == 150 < answer["turns"]
    row = answer["rows"][0]
    assert row["meets"] and row["sample_error"]["at_least"] == at_least
    assert (row["sample_error"]["dram"] > 0.05) == at_least

    def p90(dram, ssd):
        sizes = ["--dram-gb", str(dram), "--disk-gb", str(ssd)]
        assert main(["simulate", *load, *sizes, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["ttft_p90"]

    dram, ssd = row["dram_gb"], row["ssd_gb"]
    assert p90(dram, ssd) == pytest.approx(row["p90"], rel=0.01)
    assert (p90(dram / 1.1, ssd) > target) != at_least


@pytest.mark.parametrize("needed", [0.9, 1.0, 1.05, 1.2, 1.4, 1.5, 2.0, 5.0, 30.0, 99.0, 400.0])
@pytest.mark.parametrize("ssd", [0.0, 30.0])
def test_a_whole_load_that_needs_more_than_its_sample_is_run_a_few_times(needed, ssd, monkeypatch):
    """needed: times the sample's sizes; all of the state is 100 times as large."""
    runs = []

    def served(setup, form):
        runs.append(setup)
        meets = setup.dram + setup.disk >= needed * (10 + ssd)
        return SimpleNamespace(dram=setup.dram, ssd=setup.disk, p90=1 if meets else 3)

    def enough(setup, form, target):
        row = served(setup, form)
        return row if row.p90 <= target else None

    monkeypatch.setattr(buying, "served", served)
    monkeypatch.setattr(buying, "enough", enough)
    monkeypatch.setattr(buying, "state_bytes", lambda setup: 100 * (10 + ssd))
    row = buying._grown(Setup(None, None, 0, 0), "kv", (10.0, ssd), 2)
    assert len(runs) <= (5 if needed < 1.4 else 9)
    assert row.dram * ssd == pytest.approx(row.ssd * 10)
    if needed > 200:
        assert row.p90 > 2 and len(runs) == 2
    else:
        finely = 1.1 if needed < 1.4 else 1.1**buying.STEPS
        assert row.p90 <= 2 and row.dram < max(1, needed) * finely * 10.01


@pytest.mark.parametrize(
    ("best", "says"),
    [
        (("kv", 9, 40, True), "cheapest: kv, 9.0 GB DRAM, 40.0 GB SSD"),
        (("kv", 9, 0, True), "an SSD buys nothing: 9.0 GB of DRAM alone are cheapest"),
        (("none", 0, 0, True), "no tiers are needed: the GPUs alone meet the target"),
        (("none", 0, 0, False), "nothing meets the target: the GPUs are too slow for this load"),
    ],
)
def test_what_to_buy_is_a_sentence_and_says_how_far_off_a_sample_was(
    best, says, tmp_path, monkeypatch
):
    monkeypatch.setattr(report, "_plots", lambda answer: "")
    rows = [
        dict(
            zip(("form", "dram_gb", "ssd_gb", "meets"), row, strict=True),
            layer_plan="", restored_share=0.5, p50=1.0, p90=2.0, p99=3.0,
            cost_per_million_tokens=4.0,
            sample_error={"at_least": True, "dram": 0.32, "ssd": 0.1} if row == best else None,
        )
        for row in (best, ("hidden", 5, 50, False))
    ]  # fmt: skip
    answer = {
        "rows": rows, "prices": {"currency": "EUR", "source": "ours"}, "says": buying._says(rows),
        "sample": buying._of_sample(rows, 42_000), "target_ttft_p90": 2.0,
    }  # fmt: skip
    assert answer["says"].startswith(says)
    page = tmp_path / "report.html"
    report.write_report(answer, page)
    text = buying._describe(answer)
    assert "too slow" in text
    for shown in (text, page.read_text()):
        assert says in shown and "searched with 4000 of 42000 turns" in shown
        assert "needed at least 32% less DRAM" in shown
        assert ("10% less SSD" in shown) == (best[2] > 0)


def test_nothing_to_buy_is_said(capsys, tmp_path):
    prices = tmp_path / "prices.json"
    given = {
        "currency": "EUR",
        "source": "ours",
        "gpu_hour": 1,
        "dram_gb_hour": 1,
        "ssd_gb_hour": 0,
    }
    prices.write_text(json.dumps(given))
    words = [*BUY, "--ttft-p90", "1e-5", "--price-file", str(prices)]
    assert main(["capacity", *words]) == 1
    out = capsys.readouterr().out
    assert "nothing meets the target" in out and "EUR" in out
    prices.write_text(json.dumps({**given, "gpu_hour": 0}))
    assert main(["capacity", *words]) == 2
    assert re.search(r"--price-file: .*gpu_hour", capsys.readouterr().err)
    assert main(["capacity", *BUY, "--price-file", str(prices)]) == 2
    assert "--price-file: costs are ranked with --ttft-p90" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ttft-p90", "soon"], "--ttft-p90 'soon': give a number"),
        (["--ttft-p90", "0"], "--ttft-p90 '0': give a number"),
        (["--ttft-p90", "1", "--report", "/nowhere/x.html"], "--report /nowhere/x.html: give a"),
        (["--ttft-p90", "1", "--report", "/"], "--report /: give a file"),
        (["--ttft-p90", "1", "--plot", "x.png"], "--plot: shows hits, for --target"),
        (["--ttft-p90", "1", "--forms", "kv,less"], "--forms"),
        (["--ttft-p90", "1", "--gpu", "A1"], "--gpu: unknown GPU 'A1'"),
        (["--ttft-p90", "1", "--price-file", "/nowhere"], "--price-file: /nowhere: cannot be read"),
        (["--forms", "kv,hidden"], "--forms"),
        (["--report", "x.html"], "--report: costs are ranked with --ttft-p90"),
    ],
)
def test_a_mistake_in_what_to_buy_is_one_line_before_anything_is_simulated(
    capsys, monkeypatch, words, says
):
    monkeypatch.setattr(buying, "_search", lambda *given: pytest.fail("searched"))
    assert main(["capacity", *SMALL, *words]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error and "\n" not in error
