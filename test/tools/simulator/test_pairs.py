"""What this package's own servers took is what the simulator says, within a fifth."""

from __future__ import annotations

import pytest

from benchmark.simulator import pairs
from sglang_hc.tools.cli.main import main


@pytest.mark.parametrize("arm", pairs.ARMS)
def test_a_committed_record_agrees_with_the_simulator(arm: str) -> None:
    words = ["calibrate", "--record", str(pairs.COMMITTED / f"{arm}.jsonl")]
    profile = str(pairs.COMMITTED / "profile.json")
    assert main([*words, "--profile", profile, "--tolerance", "0.2"]) == 0
