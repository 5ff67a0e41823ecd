"""What the demo prints fits one screen and says what the result says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmark import demo
from benchmark.harness import arms, screen

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        (ROOT / "benchmark/results/cpu-multi-turn-gqa.json").read_text()
    )
    return loaded


def shown(result: dict[str, Any]) -> list[str]:
    plots = [Path("out/ttft_cdf.png"), Path("out/ttft_by_group.png")]
    return screen.one_screen(result, plots, Path("out")).splitlines()


def test_one_table_one_plot_one_sentence(result: dict[str, Any]) -> None:
    lines = shown(result)
    assert max(map(len, lines)) <= screen.WIDTH
    assert [line.split("|")[1].strip() for line in lines if line.startswith("|")][2:] == [
        arm["name"] for arm in result["arms"]
    ]
    # Three turns of four servers.
    assert sum("█" in line for line in lines) == 3 * len(result["arms"])
    assert lines[-2:] == ["plot:   out/ttft_by_group.png", "report: out/report.html"]


def test_bars_are_as_long_as_times_and_in_the_order_of_turns(result: dict[str, Any]) -> None:
    many = copy.deepcopy(result)
    for run in many["runs"]:
        last = run["groups"].pop("turns 1+")
        run["groups"]["turn 10"] = {**last, "median_ttft": 2000.0 if run["arm"] == "kv" else 1.0}
    lines = screen.bars(many)
    assert max(map(len, lines)) <= screen.WIDTH
    by_turn = [line.split("  ")[0].strip() for line in lines[1:]]
    assert [name for name in by_turn if name] == ["turn 0", "turn 1", "turn 2", "turn 10"]
    longest = next(line for line in lines if "2000.00 s" in line)
    assert longest.count("█") > 60
    assert all(line.count("█") == 1 for line in lines[1:] if line != longest)


def test_the_sentence_hides_no_loss_and_no_difference(result: dict[str, Any]) -> None:
    worse = copy.deepcopy(result)
    for row in worse["ratios"]:
        row["median"] = 0.8
    worse["agreement"][0] |= {"equal": 3, "compared": 15}
    worse["skipped"] = ["logprob margins could not be asked: refused"]
    text = " ".join(shown(worse))
    assert "0.8 times as fast (kv)" in text and "3 of 15 replies are equal (kv)" in text
    assert "margins could not be asked" in text


@pytest.mark.parametrize(("which", "servers"), [("talk", 2), ("forms", 3)])
def test_the_demos_print_one_screen(
    which: str,
    servers: int,
    tiny_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All that `make demo` prints, progress lines included, with servers that answer at once."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(arms, "HC_MODULE", "support.fake_sglang")
    monkeypatch.setattr(arms.machine, "has_gpu", lambda: False)
    words = [which, "--model", str(tiny_tokenizer), "--output", str(tmp_path)]
    assert demo.main(words) == 0
    out, err = capfd.readouterr()
    progress = [line.rpartition("\r")[2] for line in err.split("\n") if "100%" in line]
    # Users have a short folder; that of the test may be deep.
    lines = [*out.replace(str(tmp_path), "out/demo").splitlines(), *progress]
    assert len(progress) == servers
    assert 24 <= len(lines) <= 40
    assert max(map(len, lines)) <= screen.WIDTH
    assert ("> Summarize these amendments in one sentence." in lines) is (which == "talk")
    page = (tmp_path / "report.html").read_text()
    assert ("Summarize these amendments" in page) is (which == "talk")


def test_long_answers_are_shortened(result: dict[str, Any]) -> None:
    talk = [{"question": "Why? " * 50, "answer": "Because. " * 90}]
    question, *answer, empty = screen.conversation({**result, "conversation": talk})
    assert question.startswith("> Why? Why?") and len(question) <= screen.WIDTH
    assert len(answer) == 2 and answer[1].endswith(" ...") and not empty


@pytest.mark.parametrize("words", [[], ["walk"], ["--model", "x"]])
def test_a_demo_that_is_not_there(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(words) == 2
    assert capsys.readouterr().err == "demo: give one of talk, forms first\n"


def test_a_mistake_in_the_demos_flags_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["talk", "--model", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
