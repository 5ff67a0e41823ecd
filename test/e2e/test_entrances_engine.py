"""An `sglang.Engine` in a program of its own, which takes its options from the environment: state
comes back, and no value by its Python entrance or by the calls of native gRPC ends it. Each is
refused with a sentence or served, and the next request gets its tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.core import MODELS
from support.profiles import FREE_LOADING
from support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.server
def test_an_engine_has_the_tiers_and_no_value_ends_it(models: None, tmp_path: Path) -> None:
    options = {"forms": "kv", "host_size_gb": 0.2, "profile": str(FREE_LOADING)}
    options |= {"disk": [f"{tmp_path / 'disk'}:0.1"]}
    options |= {"overflow": "recompute", "overflow_reserve": 64}
    env = {**os.environ, "SGLANG_HC_CONFIG": json.dumps(options), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), str(ROOT / "test")])
    done = subprocess.run(
        [sys.executable, "-m", "support.hostile_engine", str(MODELS / "llama-mha")],
        env=env, capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(said) == 1, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(said[0].removeprefix("RESULT "))
    first, again = found["replies"]
    assert first == again
    assert (found["found"]["device"], found["found"]["host"]) == (0, 199)
    # Both prompts of the batch are cut, and the caller's list, which they are, stays as it is.
    assert found["cuts"] == [[64, 256], [64, 256]] and found["history"] == 700
    assert found["wrong"] == []
    for entrance in ("Engine.generate", "gRPC"):
        assert found["counted"][f"{entrance} refused"] > 50
        assert found["counted"][f"{entrance} served"] >= 4
    numbers = found["numbers"]
    assert numbers["kept_tokens"] > 0
    assert "guarded_errors" not in numbers and "refused_requests" not in numbers
