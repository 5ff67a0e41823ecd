"""Real servers that go on from what lies below another one's host memory: from the disk where its
scheduler was killed, from a directory on another host, and from the disk of a replica."""

from __future__ import annotations

import io
import json
import shutil
import signal
from contextlib import redirect_stdout
from pathlib import Path

import psutil
import pytest

from benchmark.harness.server import ServerProcess
from sglang_hc.store.disk.folders import model_folders, store_root
from sglang_hc.store.disk.sharing import living_servers
from sglang_hc.tools.cli.main import main
from support.dashboards import OF_DISK, OF_REMOTE, ON_FAILURE, missing
from support.prompts import in_directory, on_disk, prompt
from support.ranked_core import ENV
from support.scraped import samples
from support.served import (
    ask_replica,
    first_turn,
    generate,
    get,
    replicas,
    replicas_remember,
    start,
    wait_for,
)

pytestmark = pytest.mark.server

PROMPT = prompt(8, 300)


def test_a_killed_scheduler_costs_no_token(models: None, tmp_path: Path) -> None:
    disk = on_disk(tmp_path / "d")
    with start(tmp_path / "log", *disk) as server:
        saved = first_turn(server, PROMPT, "disk_saved_blocks")
        below = psutil.Process(server.pid).children(recursive=True)
        (scheduler,) = [one for one in below if "scheduler" in "".join(one.cmdline())]
        scheduler.send_signal(signal.SIGKILL)
    with start(tmp_path / "log2", *disk, "--enable-metrics") as server:
        assert generate(server, saved.history, 16) == saved.answer
        look_at(server, saved.blocks, "disk")
        absent = missing(get(server, "/metrics"))
        assert absent == OF_REMOTE | ON_FAILURE, "the dashboard asks for what is not there"


def look_at(server: ServerProcess, blocks: int, tier: str) -> None:
    """What came from a tier shows under SGLang's names and in `sglang-hc top`."""
    tokens = 64 * blocks
    charted = [  # each within a second or so
        ("sglang:prefetched_tokens_total", {}, tokens),
        ("sglang:cached_tokens_total", {"cache_source": "storage"}, tokens),
        ("sglang_hc_prompt_tokens_total", {"source": tier}, tokens),
        ("sglang_hc_fetch_seconds_count", {"tier": tier}, blocks),
    ]
    wait_for(lambda: all(scraped(server, name, **labels) == n for name, labels, n in charted))
    shown = io.StringIO()
    with redirect_stdout(shown):
        assert main(["top", "--once", "--json", server.url]) == 0
    (found,) = json.loads(shown.getvalue())["servers"]
    assert found["prompt_tokens"][tier] == tokens
    assert found["running"] == found["queued"] == 0 and found["slowest"]
    for seed in (20, 21, 22):  # what the device evicted is not a series before it evicts
        generate(server, prompt(seed, 300), 1)


def scraped(server: ServerProcess, name: str, **labels: str) -> float:
    found = samples(get(server, "/metrics"))
    return sum(value for one, has, value in found if one == name and labels.items() <= has.items())


def test_a_conversation_moves_to_another_host(models: None, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    remote = in_directory(shared)
    with start(tmp_path / "log", *remote) as server:
        saved = first_turn(server, PROMPT, "remote_saved_blocks")
        other = generate(server, PROMPT[::-1], 16)[0]
    with start(tmp_path / "log2", *remote, "--enable-metrics") as server:
        assert generate(server, saved.history, 16) == saved.answer
        look_at(server, saved.blocks, "remote")
        assert missing(get(server, "/metrics")) == OF_DISK | ON_FAILURE
        shutil.rmtree(shared)
        assert generate(server, PROMPT[::-1], 16) == (other, 0), "the store is gone, not the server"


def test_replicas_remember_their_conversations_and_share_the_disk(
    models: None, tmp_path: Path
) -> None:
    disk, trace = tmp_path / "disk", tmp_path / "trace.jsonl"
    flags = ("--dp-size", "2", "--hc-disk", f"{disk}:2", "--hc-trace", str(trace))
    with start(tmp_path / "log", *flags, env=ENV) as server:
        first, second = replicas(server)
        assert first["host_slots"] == second["host_slots"]
        assert 0.09 * 2**30 < first["host_bytes"] <= 0.1 * 2**30, "half of --hc-host-size-gb each"
        (_,) = model_folders(store_root(str(disk)))

        histories, kept = replicas_remember(server)
        for numbers in replicas(server):
            assert numbers["restorations"] >= 1

        # A conversation that returns to the other replica, which is asked for it as soon as both
        # know of each other.
        blocks = len(histories[0]) // 64
        wait_for(lambda: len(living_servers(store_root(str(disk)))) == 2)
        wait_for(lambda: all(one["disk_blocks"] >= 2 * blocks for one in replicas(server)))
        tokens, found = ask_replica(server, histories[0], 1)
        assert tokens == kept[0] and found.get("storage", 0) == blocks * 64
    assert sorted(path.name for path in tmp_path.glob("trace*")) == [
        "trace.jsonl.dp0",
        "trace.jsonl.dp1",
    ]
