"""The numbers of a server with every tier, against docs/metrics.md."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from sglang_hc.metrics import COUNTS, LEVELS
from support.core import Core, run_in_child

MANUAL = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def numbers(folder: str) -> tuple[set[str], set[str], set[str]]:
    """Names of levels, of counts, and of all that /server_info shows, after a chat with cuts and
    evictions."""
    core = Core(
        "--dtype", "float32", "--hc-forms", "hidden:2,kv:2", "--max-total-tokens", "640",
        "--hc-io", "process", "--hc-disk", f"{folder}/disk:0.1", "--hc-trace", f"{folder}/trace",
        "--hc-remote", "file", "--hc-remote-config", json.dumps({"dir": folder}),
        "--hc-overflow", "recompute", "--hc-overflow-reserve", "64", "--hc-host-size-gb", "0.01",
    )  # fmt: skip
    rng = random.Random(5)
    for _ in range(3):
        for seed in range(4):
            core.ask(random.Random(seed).choices(range(3, 900), k=300), 8)
        core.ask(rng.choices(range(3, 900), k=900), 8)
    core.settle()
    tiers = core.tree.tiers
    shown = set(tiers.levels()), set(tiers.counts()), set(core.tree.stats())
    core.tree.release_host_resources()
    return shown


def test_a_server_with_every_tier_shows_what_the_manual_lists(models: None, tmp_path: Path) -> None:
    levels, counts, shown = run_in_child(numbers, str(tmp_path))
    assert levels == set(LEVELS)
    manual = MANUAL.read_text()
    by_reason = re.compile("|".join(re.findall(r"`([a-z_]+_)\*`", manual)))
    assert {"disk_saved_blocks", "remote_saved_blocks", "evicted_blocks"} <= counts
    assert {"restore_decision_load", "overflow_requests"} <= counts
    assert all(name in COUNTS or by_reason.match(name) for name in counts), counts
    others = shown - levels - counts
    assert others and all(f"`{name}`" in manual for name in others), others
