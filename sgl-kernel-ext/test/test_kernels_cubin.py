"""Every kernel compiles on a machine without a GPU, for each architecture within its shared memory.

In its own process: this one's Triton interprets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_cases import has_fp8

SCRIPT = Path(__file__).parent / "compile_cubins.py"
SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227}
"""What one program may use."""

Facts = dict[str, dict[str, int]]


def compiled_by(folder: Path, *words: str) -> Facts:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[1] / "python")
    environment["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Facts = json.loads(done.stdout)
    return found


def check(found: Facts) -> None:
    for name, facts in found.items():
        if facts.get("refused"):
            continue
        assert facts["cubin_bytes"] > 1000, name
        assert facts["shared_bytes"] <= SHARED_KIB[name.split()[0]] * 1024, name
        if " project " in name:
            assert facts["matrix_instructions"] > 0, name


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return compiled_by(tmp_path_factory.mktemp("triton"))


def test_every_configuration_gives_a_cubin_within_shared_memory(compiled: Facts) -> None:
    """Without RoPE a projection of 4,096 rows took 144 KiB on GPUs that have 99."""
    check(compiled)
    projected = [name.split()[0] for name in compiled if " project " in name]
    assert {arch: projected.count(arch) >= 3 for arch in SHARED_KIB} == dict.fromkeys(
        SHARED_KIB, True
    )


def test_nothing_of_the_usual_spills(compiled: Facts) -> None:
    assert {name for name, facts in compiled.items() if facts.get("spilled_bytes")} == set()


def test_wide_copies_move_sixteen_bytes(compiled: Facts) -> None:
    assert compiled["sm_90 rows wide"]["vector_stores"] > 0


def test_fp8_compiles_where_the_tests_think_it_does(compiled: Facts) -> None:
    for arch in SHARED_KIB:
        major, minor = divmod(int(arch.removeprefix("sm_")), 10)
        assert compiled[f"{arch} epilogue fp8"]["refused"] != has_fp8((major, minor)), arch


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_KIB)
def test_every_kind_of_projection_fits_on_every_architecture(tmp_path: Path, arch: str) -> None:
    """Head sizes, with and without RoPE, with all rows that a start launches."""
    found = compiled_by(tmp_path, "--every", arch.removeprefix("sm_"))
    assert len(found) >= 32
    check(found)
