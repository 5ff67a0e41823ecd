"""What this package's own servers took is what the simulator says, within a fifth."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.simulator import pairs
from sglang_hc.tools.cli.main import main


@pytest.mark.parametrize("record", pairs.committed(), ids=lambda record: record.stem)
def test_a_committed_record_agrees_with_the_simulator(record: Path) -> None:
    profile = str(record.with_name("profile.json"))
    words = ["--record", str(record), "--profile", profile, "--tolerance", "0.2"]
    assert main(["calibrate", *words]) == 0
