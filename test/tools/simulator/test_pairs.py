"""What this package's own servers took is what the simulator says, within a fifth."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.simulator import pairs
from sglang_hc.tools.cli.main import main


def test_records_are_committed() -> None:
    """Without them the next test would have nothing to say."""
    assert {"hidden", "queue"} <= {record.stem for record in pairs.committed()}


@pytest.mark.parametrize("record", pairs.committed(), ids=lambda record: record.stem)
def test_a_committed_record_agrees_with_the_simulator(record: Path) -> None:
    profile = str(record.with_name("profile.json"))
    words = ["--record", str(record), "--profile", profile, "--tolerance", "0.2"]
    assert main(["calibrate", *words]) == 0
