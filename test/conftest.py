"""Fixtures shared by all tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def models() -> None:
    """The tiny checkpoints under models/, made on first use."""
    script = ROOT / "scripts" / "make_tiny_models.py"
    subprocess.run([sys.executable, str(script), "--output", str(ROOT / "models")], check=True)
