"""benchmark/restore as far as it goes without a model: bounds, goals, cases in processes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hc.forms import LayerPlan, StateShape
from sglang_hc.policy.model_shape import ModelShape

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [ROOT / "benchmark" / "restore", ROOT / "benchmark" / "gpu"]
MODULES = ("engine", "ceilings", "run", "cases", "measured", "from_disk", "settings")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in SCRIPTS:
        monkeypatch.syspath_prepend(str(folder))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_bound_is_the_slower_of_copies_and_products(scripts: Any) -> None:
    """Llama 2 7B, 1,000 tokens: 512 KiB a token as KV, half as hidden states."""
    model = ModelShape.from_config(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "torch_dtype": "bfloat16",
        }
    )
    engine = SimpleNamespace(shape=StateShape(32, 8192, (8192, 8192), "bfloat16"))
    bound = scripts("ceilings").bound

    def seconds(plan: LayerPlan, bandwidth: float = 1e9, rate: float = 1e15) -> float:
        found: float = bound(engine, model, plan, 1000, bandwidth, rate)
        return found

    assert seconds(LayerPlan(0, 0, 32)) == pytest.approx(0.524288)
    assert seconds(LayerPlan(0, 32, 0)) == pytest.approx(0.262144)
    slow = seconds(LayerPlan(0, 32, 0), rate=1e12)
    assert slow == pytest.approx(32 * 1000 * 2 * 4096 * 8192 / 1e12)
    # Weights of 32 layers are 6.476e9 elements; attention adds 1.5 % at this length.
    everything = seconds(LayerPlan(32, 0, 0), rate=1e12)
    assert everything == pytest.approx(2 * 6.476e9 * 1000 / 1e12, rel=0.03)


def test_goals_are_checked_per_history(scripts: Any) -> None:
    def row(history: int, arm: str, seconds: float, of_bound: float = 0.95) -> dict[str, Any]:
        return {
            "history": history,
            "source": "host",
            "arm": arm,
            "seconds": seconds,
            "of_bound": of_bound,
        }

    rows = [row(1024, "recompute", 9.0), row(1024, "kv", 4.4), row(1024, "hidden", 2.4)]
    rows += [row(1024, "mix", 2.0), {**row(1024, "mix", 99.0), "source": "disk"}]
    run = scripts("run")
    lines = run.goal_lines({"rows": rows}, "llama-2-7b")
    assert lines == [
        "met: 1024 tokens, 2.20 times kv, goal 2.1",
        "met: 1024 tokens, 4.50 times recompute, goal 4.4",
        "met: 1024 tokens, 1.20 times hidden, goal 1",
        "met: 1024 tokens, 0.95 of its bound, goal 0.9",
    ]
    rows[3] = row(1024, "mix", 2.5, 0.7)
    lines = run.goal_lines({"rows": rows}, "llama-3.1-8b")
    assert lines == [
        "MISSED: 1024 tokens, 0.96 times hidden, goal 1",
        "MISSED: 1024 tokens, 0.70 of its bound, goal 0.9",
    ]


def test_a_case_answers_through_its_process_and_a_failing_one_says_why(
    scripts: Any, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "case = json.loads(sys.argv[2])\n"
        "if case['fail']: sys.exit('no such device')\n"
        "print('noise'); print('RESULT ' + json.dumps(case | {'done': True}))\n"
    )
    run_case = scripts("cases").run_case
    assert run_case(str(script), {"fail": False}) == {"fail": False, "done": True}
    with pytest.raises(RuntimeError, match="no such device"):
        run_case(str(script), {"fail": True})
