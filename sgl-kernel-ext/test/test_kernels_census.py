"""No kernel is compiled while a server serves: all of them are among those launched at its start.

In a process of its own: this one's Triton interprets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "census.py"


@pytest.mark.parametrize(
    "arch", [*(pytest.param(arch, marks=pytest.mark.slow) for arch in ("80", "86", "89")), "90"]
)
def test_every_row_count_is_served_by_a_kernel_that_the_start_compiled(
    tmp_path: Path, arch: str
) -> None:
    """With row lists that begin anywhere; each kernel is compiled on the way."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[1] / "python")
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), arch], env=environment, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: counts["served"] for name, counts in found.items()} == {
        "epilogue-mha": 1,
        "epilogue-gqa-bias-norm-partial": 1,
        "project-mha": 3,
        "project-gqa-bias-norm-partial": 3,
        "project-head-256": 2,
        "project-without-rope": 3,
        "rows": 1,
    }
    for name, counts in found.items():
        assert counts["warmed"] == counts["served"], name
