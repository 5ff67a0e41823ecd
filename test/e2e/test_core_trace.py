"""`--hc-trace` under SGLang's real scheduler: the simulator makes the run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_hc.tools.cli.main import main
from support.branching_talks import FLAGS, talk
from support.core import Core, run_in_child

TALKS = 12


def recorded_run(folder: str, forms: str, eviction: str, prefetch: str) -> tuple:
    core = Core(
        *FLAGS, "--hc-forms", forms, "--hc-disk", f"{folder}/disk:1", "--hc-eviction", eviction,
        "--hc-prefetch", prefetch, "--hc-trace", f"{folder}/t.jsonl",
    )  # fmt: skip
    rids = talk(core, TALKS)
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
