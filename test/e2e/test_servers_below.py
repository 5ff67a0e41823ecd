"""Real servers that go on from what lies below another one's host memory: from the disk where its
scheduler was killed, from a directory on another host, and from the disk of a replica."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import psutil
import pytest

from sglang_hc.store.disk.folders import model_folders, store_root
from sglang_hc.store.disk.sharing import living_servers
from support.prompts import in_directory, on_disk, prompt
from support.ranked_core import ENV
from support.served import (
    ask_replica,
    first_turn,
    generate,
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
    with start(tmp_path / "log2", *disk) as server:
        assert generate(server, saved.history, 16) == saved.answer


def test_a_conversation_moves_to_another_host(models: None, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    remote = in_directory(shared)
    with start(tmp_path / "log", *remote) as server:
        saved = first_turn(server, PROMPT, "remote_saved_blocks")
        other = generate(server, PROMPT[::-1], 16)[0]
    with start(tmp_path / "log2", *remote) as server:
        assert generate(server, saved.history, 16) == saved.answer
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
