"""`--dp-size 2` on a real server: each replica has its part of the host memory, and both find each
other's blocks on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hc.store.disk.folders import model_folders, store_root
from sglang_hc.store.disk.sharing import living_servers
from support.prompts import prompt
from support.served import ask_replica, replicas, start, wait_for

pytestmark = pytest.mark.server


def test_replicas_remember_their_conversations_and_share_the_disk(
    models: None, tmp_path: Path
) -> None:
    disk, trace = tmp_path / "disk", tmp_path / "trace.jsonl"
    flags = ("--dp-size", "2", "--hc-disk", f"{disk}:2", "--hc-trace", str(trace))
    with start(tmp_path / "log", *flags) as server:
        first, second = replicas(server)
        assert first["host_slots"] == second["host_slots"]
        assert 0.09 * 2**30 < first["host_bytes"] <= 0.1 * 2**30, "half of --hc-host-size-gb each"
        (_,) = model_folders(store_root(str(disk)))

        histories = []
        for replica in (0, 1):
            tokens = prompt(replica, 300)
            histories.append(tokens + ask_replica(server, tokens, replica)[0])
        kept = [ask_replica(server, history, r) for r, history in enumerate(histories)]
        assert all(found.get("device", 0) > 300 for _, found in kept)
        for replica in (0, 1):
            for seed in range(10, 16):
                ask_replica(server, prompt(seed, 300), replica)
        for replica, history in enumerate(histories):
            tokens, found = ask_replica(server, history, replica)
            assert tokens == kept[replica][0], "the tokens of a replica that never forgot"
            assert found.get("device", 0) == 0 and found.get("host", 0) > 300
        for numbers in replicas(server):
            assert numbers["restorations"] >= 1

        # A conversation that returns to the other replica, which is asked for it as soon as both
        # know of each other.
        blocks = len(histories[0]) // 64
        wait_for(lambda: len(living_servers(store_root(str(disk)))) == 2)
        wait_for(lambda: all(one["disk_blocks"] >= 2 * blocks for one in replicas(server)))
        tokens, found = ask_replica(server, histories[0], 1)
        assert tokens == kept[0][0] and found.get("storage", 0) == blocks * 64
    assert sorted(path.name for path in tmp_path.glob("trace*")) == [
        "trace.jsonl.dp0",
        "trace.jsonl.dp1",
    ]
