"""The ways from hidden states to K and V, and from the pool to the host, at the call sites of the
server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / name) for name in ("python", "test", "sgl-kernel-ext/python")]


MODELS = ("qwen3", "phi")
"""qwen3 has a K norm and full rotation, phi biases and a partial one."""


@pytest.fixture(scope="module")
def interpreted(models: None) -> dict[str, Any]:
    """What each model's kernels did in Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "support.interpreted", *MODELS],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(PATHS)},
        capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_kernels_write_what_the_model_writes_and_wrong_ones_are_left_out(
    interpreted: dict[str, Any], model: str
) -> None:
    found = interpreted[model]
    ways = ["sglang", "epilogue", "fused"]
    assert found["ways"] == ways
    assert found["agree"] == sorted(ways)
    assert found["chosen"] == "fused"
    assert found["agree_when_wrong"] == ["fused", "sglang"]
    assert found["ways_beyond_the_table"] == found["ways_where_bits_matter"] == ["sglang"]
    assert found["served"] in ("by_sglang", "by_epilogue", "by_fused")
    assert found["chosen_when_counted"] == "fused"
    assert found["warmed_rows"] == [1, 7, 48]  # as far as there are slots
    assert found["scratch_is_gone"]
    assert found["bytes_stay"]
    gathers = found["gathers"]
    assert gathers["chosen"] == gathers["all_slots"] == "kernel"
    assert gathers["served"] in ("gather", "kernel")
    assert gathers["when_wrong"] == gathers["when_it_fails"] == "torch"
    assert len(gathers["tables"]) == 2, "tables are made once for each part"
    assert gathers["timed"] == [["kernel", 20], ["torch", 20]]  # as many as a piece holds
    assert gathers["into_the_middle"]
