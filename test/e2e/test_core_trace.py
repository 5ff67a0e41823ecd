"""`--hc-trace` under SGLang's real scheduler: its load, simulated, hits what the server did."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from sglang_hc.tools.cli.main import main
from sglang_hc.tools.simulator.models import load_model
from sglang_hc.tools.workloads.recorded import linked, read_record
from support.core import MODELS, Core, run_in_child
from support.prompts import SMALL

TALKS, REQUESTS = 8, 40
DEVICE = 640
HOST_GIB = {"kv": "0.01", "hidden": "0.005", "hidden:2,kv:2": "0.0075"}
"""Room for about as many blocks in each form, and not for all conversations."""


def recorded_run(folder: str, forms: str, eviction: str, disk: bool) -> list:
    """Conversations with a common start that come back in random order, one at a time. Returns the
    tokens that came from device and tiers for each request."""
    below = ("--hc-disk", f"{folder}/disk:1") if disk else ()
    core = Core(
        "--hc-forms", forms, *below, "--hc-eviction", eviction, "--hc-trace", f"{folder}/t.jsonl",
        *SMALL, "--hc-host-size-gb", HOST_GIB[forms],
    )  # fmt: skip
    rng = random.Random(3)
    system = rng.choices(range(3, 900), k=64)
    talks = [system + rng.choices(range(3, 900), k=90) for _ in range(TALKS)]
    replies = []
    for _ in range(REQUESTS):
        talk = rng.choice([t for t in talks if len(t) < DEVICE - 100])
        replies.append(core.ask(talk, 8))
        talk += [*replies[-1].tokens, *rng.choices(range(3, 900), k=30)]
        core.settle()
    evicted = core.tree.stats()["evicted_blocks"]
    core.tree.release_host_resources()
    return [[(r.device, r.host + r.storage) for r in replies], evicted]


@pytest.mark.parametrize(
    ("forms", "eviction", "disk"),
    [("kv", "queue", True), ("hidden", "lru", False), ("hidden:2,kv:2", "queue", False)],
)
def test_the_load_simulated_hits_what_the_server_did(
    models: None, tmp_path: Path, capsys, forms: str, eviction: str, disk: bool
) -> None:
    replies, evicted = run_in_child(recorded_run, str(tmp_path), forms, eviction, disk)
    path = tmp_path / "t.jsonl"
    header, *events = map(json.loads, path.read_text().splitlines())
    admitted = [event for event in events if event["op"] == "admit"]
    assert [(a["device"], a["restored"]) for a in admitted] == replies
    assert events[-1]["op"] == "end" and evicted > 20
    for number in range(REQUESTS):
        own = [event["op"] for event in events if event.get("req") == number]
        own = [op for op in own if op != "passed"]
        assert own == ["arrive", "admit", "first", "finish"]
    # Slots count, not bytes: the server runs in float32, whatever the model's file says.
    slot = load_model(str(MODELS / "llama-mha"), forms).slot_bytes
    dram = (header["host_slots"] + 0.5) * slot / 1e9
    words = ["--workload", str(path), "--model", str(MODELS / "llama-mha"), "--forms", forms]
    words += ["--dram-gb", f"{dram:.9f}", "--disk-gb", "1" if disk else "0", "--policy", eviction]
    assert main(["simulate", *words, "--context", "2048", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    hit = sum(a["device"] + a["hit"] for a in admitted)
    simulated = sum(found[f"{tier}_hit_tokens"] for tier in ("device", "host", "disk"))
    assert simulated == pytest.approx(hit, rel=0.05)
    assert (found["disk_hit_tokens"] > 0) == disk


def plain_run(path: str) -> list[list[int]]:
    """Two prompts at once, one of which is answered with one token, on a server without tiers; and
    what goes on behind the other. Returns prompts and replies."""
    core = Core("--hc-disable", "--hc-trace", path, *SMALL)
    one, other = list(range(3, 90)), list(range(100, 150))
    names = core.submit(one, 1), core.submit(other, 6)
    core.run()
    short, long = map(core.reply, names)
    later = [*other, *long.tokens, 7, 8]
    last = core.ask(later, 4)
    time.sleep(0.2)  # the writer looks every 50 ms
    return [one, short.tokens, other, long.tokens, later, last.tokens]


def test_a_server_without_tiers_records_its_load(models: None, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    one, short, other, long, later, last = run_in_child(plain_run, str(path))
    found = read_record(path)
    assert found.served.host_slots == 0 and found.served.eviction == "none"
    told = [(len(r.tokens) // 4, len(r.answer) // 4) for r in found.requests]
    assert told == [(len(one), 0), (len(other), len(long) - 1), (len(later), len(last) - 1)]
    for request in found.requests:
        assert request.first is not None and request.arrived <= request.first <= request.ended
    assert [len(talk) for talk in linked(found.requests)] == [1, 2]
    assert len(short) == 1
