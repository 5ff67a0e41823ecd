"""benchmark/restore as far as it goes without a model: bounds, goals, cases in processes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.harness import machine
from benchmark.harness.cases import run_case
from benchmark.harness.cells import CellFile, latest, read
from benchmark.restore import from_source, run
from benchmark.restore.capture import host_gb
from benchmark.restore.ceilings import bound
from benchmark.restore.goals import restore_lines
from sglang_hc.forms import LayerPlan, StateShape
from support.papers import SHAPE


def test_the_bound_is_the_slower_of_copies_and_products() -> None:
    """Llama 2 7B, 1,000 tokens: 512 KiB a token as KV, half as hidden states."""
    engine = SimpleNamespace(shape=StateShape(32, 8192, (8192, 8192), "bfloat16"))

    def seconds(plan: LayerPlan, bandwidth: float = 1e9, rate: float = 1e15) -> float:
        found: float = bound(engine, SHAPE, plan, 1000, bandwidth, rate)
        return found

    assert seconds(LayerPlan(0, 0, 32)) == pytest.approx(0.524288)
    assert seconds(LayerPlan(0, 32, 0)) == pytest.approx(0.262144)
    slow = seconds(LayerPlan(0, 32, 0), rate=1e12)
    assert slow == pytest.approx(32 * 1000 * 2 * 4096 * 8192 / 1e12)
    # Weights of 32 layers are 6.476e9 elements; attention adds 1.5 % at this length.
    everything = seconds(LayerPlan(32, 0, 0), rate=1e12)
    assert everything == pytest.approx(2 * 6.476e9 * 1000 / 1e12, rel=0.03)


def test_goals_are_checked_per_history_and_kind_of_slots() -> None:
    def row(arm: str, seconds: float, of_bound: float = 0.95, **other: Any) -> dict[str, Any]:
        place = {"history": 1024, "slots": "adjacent", "source": "host", **other}
        return {**place, "arm": arm, "seconds": seconds, "of_bound": of_bound}

    rows = [row("recompute", 9.0, source="-"), row("kv", 4.4), row("hidden", 2.4)]
    rows += [row("mix", 2.0), row("mix", 99.0, source="disk")]
    rows += [row("kv", 1.0, slots="scattered"), row("mix", 1.0, 0.5, history=64)]
    lines = restore_lines(rows, "llama-2-7b")
    assert lines == [
        "met: 1024 tokens in adjacent slots, 1.20 times hidden, goal 1",
        "met: 1024 tokens in adjacent slots, 2.20 times kv, goal 2.1",
        "met: 1024 tokens in adjacent slots, 4.50 times recompute, goal 4.4",
        "met: 1024 tokens in adjacent slots, 0.95 of its bound, goal 0.9",
    ]
    rows[3] = row("mix", 2.5, 0.7)
    assert restore_lines(rows, "llama-3.1-8b") == [
        "MISSED: 1024 tokens in adjacent slots, 0.96 times hidden, goal 1",
        "MISSED: 1024 tokens in adjacent slots, 0.70 of its bound, goal 0.9",
    ]


def test_a_failing_arm_costs_itself_only(tmp_path: Path) -> None:
    """Rows are kept as they are measured, a failure among them, and not measured again."""
    calls: list[str] = []

    def fails() -> None:
        raise RuntimeError("no such kernel")

    def arms(slots: str, n: int) -> list[Any]:
        plan = LayerPlan(0, 0, 4)
        good = [
            run.Arm("host", name, plan, lambda a=name: calls.append(a)) for name in ("kv", "mix")
        ]
        return [good[0], run.Arm("host", "hidden", plan, fails), good[1]]

    def seconds(work: Any) -> float:
        work()
        return 0.5

    part = SimpleNamespace(
        args=run.arguments(["--shape", "llama-2-7b", "--rounds", "2"]),
        engine=SimpleNamespace(seconds=seconds),
        arms=arms,
        row=lambda arm, slots, n, taken: {
            "arm": arm.name, "seconds": taken[0], "of_bound": 1.0, "runs_as": "kv:4", "all": taken
        },
    )  # fmt: skip
    path = tmp_path / "cells.jsonl"
    rows = run.measure(part, "adjacent", 1024, CellFile(path, "restore"))
    assert [row["arm"] for row in rows] == ["kv", "mix"] and rows[0]["all"] == [0.5, 0.5]
    assert calls == ["kv", "mix"] * 3
    found = latest(read(path))
    assert {key.rpartition("/")[2]: cell["status"] for key, cell in found.items()} == {
        "kv": "ok", "hidden": "failed", "mix": "ok"
    }  # fmt: skip
    failure = found["restore/llama-2-7b/adjacent/1024/host/hidden"]["values"]
    assert "no such kernel" in failure["reason"] and "Traceback" in failure["log"]
    calls.clear()
    run.measure(part, "adjacent", 1024, CellFile(path, "restore"))
    assert not calls


def test_the_host_memory_of_a_capture_run_holds_what_it_makes(tmp_path: Path) -> None:
    """30,000 tokens of 256 KiB are 7.3 GiB; three times 48 GiB were pinned for them once."""
    config = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 32}))
    tokens = 42 * 704
    for forms, kib in (("hidden", 256), ("kv", 512)):
        held = host_gb(tmp_path, forms, tokens) * 2**20 / tokens
        assert kib <= held <= 1.5 * kib


def test_a_case_answers_through_its_process_and_a_failing_one_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "answers.py"
    script.write_text(
        "import json, sys\n"
        "case = json.loads(sys.argv[2])\n"
        "if case['fail']: sys.exit('no such device')\n"
        "print('noise'); print('RESULT ' + json.dumps(case | {'done': True}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_case("answers", {"fail": False}) == {"fail": False, "done": True}
    with pytest.raises(RuntimeError, match="no such device"):
        run_case("answers", {"fail": True})


def test_a_file_of_the_tree_is_found_as_a_module_however_it_was_started(tmp_path: Path) -> None:
    """Run by its path a benchmark has no `__spec__`, and could start none of its cases."""
    assert machine.module(from_source.__file__) == "benchmark.restore.from_source"
    assert machine.module(str(tmp_path / "other.py")).endswith("other")


def test_rows_of_several_restarts_are_their_medians() -> None:
    """Each has costs of its own, so what was expected is a median too."""
    rows = [
        {"ttft_ms": 3.0, "bound_ms": 1.0, "predicted_ms": 5.0},
        {"ttft_ms": 1.0, "bound_ms": 3.0, "predicted_ms": 4.0},
        {"ttft_ms": 2.0, "bound_ms": 2.0, "predicted_ms": 9.0},
    ]
    found = from_source.median_of(rows)
    assert found.pop("all_ms") == [3.0, 1.0, 2.0]
    assert found == {"ttft_ms": 2.0, "bound_ms": 2.0, "predicted_ms": 5.0}
