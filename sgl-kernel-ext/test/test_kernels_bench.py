"""The benchmark's arms do the same work; its times need a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmark" / "bench_kernels.py"


def test_every_arm_agrees_with_the_first(device: str) -> None:
    spec = importlib.util.spec_from_file_location("bench_kernels", SCRIPT)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules["bench_kernels"] = bench
    spec.loader.exec_module(bench)
    torch.manual_seed(0)
    layer = bench.Layer(bench.Shape(heads=2, head_size=16, hidden=32), 9, device)
    tiles = (bench.Tile(16, 32, 4, 2),)
    for group in bench.groups(layer, tiles):
        worst = bench.agreement(group)
        assert len(worst) >= 2
        assert max(worst.values()) <= 0.05, group.name
        assert all(output.abs().sum() > 0 for output in group.outputs), group.name


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells users of machines without a GPU")
def test_without_a_gpu_one_clear_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "x.json")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr and "Traceback" not in done.stderr
