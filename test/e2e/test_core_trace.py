"""`--hc-trace` under SGLang's real scheduler: the simulator makes the run again."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from sglang_hc.tools.cli.main import main
from support.core import Core, run_in_child

SYSTEM = random.Random(1).choices(range(3, 900), k=100)
TALKS = 12


def recorded_run(folder: str, forms: str, eviction: str, prefetch: str) -> tuple:
    """Conversations with a common start, of which the host tier holds two or three, come back."""
    core = Core(
        "--hc-forms", forms, "--hc-disk", f"{folder}/disk:1", "--max-total-tokens", "1200",
        "--dtype", "float32", "--hc-host-size-gb", "0.008", "--hc-eviction", eviction,
        "--hc-prefetch", prefetch, "--max-running-requests", "3", "--hc-trace",
        f"{folder}/t.jsonl", "--random-seed", "1",
    )  # fmt: skip
    rng = random.Random(5)
    prompts = [SYSTEM + [rng.randrange(3, 900) for _ in range(90)] for _ in range(TALKS)]
    rids = []
    histories = prompts
    for turn in range(3):
        salts = ["other" if number % 5 == 0 else None for number in range(TALKS)]
        now = [core.submit(h, 8, s) for h, s in zip(histories, salts, strict=True)]
        extra = core.submit(histories[0][:150], 8)
        core.abort(extra)  # while it waits
        core.run()
        rids += now
        histories = [
            h + core.reply(rid).tokens + [7, 8, 9 + turn]
            for h, rid in zip(histories, now, strict=True)
        ]
    core.settle()
    stats = core.tree.stats()
    core.tree.release_host_resources()
    return [core.reply(rid) for rid in rids], stats


@pytest.mark.parametrize(
    ("forms", "eviction", "prefetch"),
    [("kv", "queue", "queue"), ("hidden", "lru", "on-arrival"), ("hidden:2,kv:2", "queue", "off")],
)
def test_the_simulator_hits_and_evicts_what_the_server_did(
    models: None, tmp_path: Path, capsys, forms: str, eviction: str, prefetch: str
) -> None:
    replies, stats = run_in_child(recorded_run, str(tmp_path), forms, eviction, prefetch)
    assert stats["trace_dropped"] == 0 and stats["trace_events"] > 500
    assert main(["replay", str(tmp_path / "t.jsonl"), "--json"]) == 0, capsys.readouterr().out
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["equal"] and replayed["whole"]
    assert replayed["evictions"] == stats["evicted_blocks"] > 20
    assert replayed["hit_tokens"] >= sum(r.host + r.storage for r in replies) > 0
    assert (replayed["disk_tokens"] > 0) == (prefetch != "off")
