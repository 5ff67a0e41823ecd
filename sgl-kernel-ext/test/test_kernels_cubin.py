"""Every kernel compiles to an sm_90 cubin on a machine without a GPU.

In its own process: this one's Triton interprets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_cubins.py"
SHARED_LIMIT = 227 * 1024
"""Bytes one program may use on sm_90."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[1] / "python")
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_configuration_gives_a_cubin_within_shared_memory(
    compiled: dict[str, dict[str, int]],
) -> None:
    assert len(compiled) >= 7
    for name, facts in compiled.items():
        assert facts["cubin_bytes"] > 1000, name
        assert facts["shared_bytes"] <= SHARED_LIMIT, name


def test_projection_uses_tensor_cores_and_does_not_spill(
    compiled: dict[str, dict[str, int]],
) -> None:
    for name, facts in compiled.items():
        assert facts["spilled_bytes"] == 0, name
        if name.startswith("project"):
            assert facts["matrix_instructions"] > 0, name


def test_wide_copies_move_sixteen_bytes(compiled: dict[str, dict[str, int]]) -> None:
    assert compiled["rows-wide"]["vector_stores"] > 0
