"""Mooncake Store as the remote store: its real master, its storage node and client, on loopback.

Skipped where the package `mooncake` is not there; `scripts/try_mooncake.sh` fetches it first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmark.harness.server import free_port
from support.core import Once, run_in_child
from support.two_servers import (
    PROMPT,
    STORED,
    both_turns,
    first_turn,
    history,
    second_turn,
    server,
)
from support.waiting import HANGS_S, until

FOUND = importlib.util.find_spec("mooncake")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(FOUND is None, reason="the package mooncake is not installed"),
]


def start(stack: ExitStack, log: Path, program: str, port: int, *arguments: str) -> int:
    """A program of the package, stopped with the stack; its process id when its port answers."""
    assert FOUND is not None and FOUND.submodule_search_locations
    path = Path(FOUND.submodule_search_locations[0]) / program
    process = subprocess.Popen([path, *arguments], stdout=log.open("wb"), stderr=subprocess.STDOUT)
    stack.callback(process.wait, HANGS_S)
    stack.callback(process.kill)

    def listens() -> bool:
        assert process.poll() is None, f"{program}: {log.read_text()[-2000:]}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    until(listens, pause=0.1)
    return process.pid


class Store(NamedTuple):
    """processes: ids of the master and of the node."""

    flags: tuple[str, ...]
    processes: tuple[int, int]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A master and a node that holds 256 MB, so that blocks outlive the server they are from."""
    master, metrics, node = free_port(), free_port(), free_port()
    address = f"127.0.0.1:{master}"
    with ExitStack() as stack:
        first = start(
            stack, tmp_path / "master.log", "mooncake_master", master,
            "--rpc_address=127.0.0.1", f"--rpc_port={master}", f"--metrics_port={metrics}",
        )  # fmt: skip
        second = start(
            stack, tmp_path / "node.log", "mooncake_client", node,
            "--host=127.0.0.1", f"--port={node}", "--global_segment_size=256 MB",
            f"--master_server_address={address}", "--metadata_server=P2PHANDSHAKE",
        )  # fmt: skip
        options = {
            "master_server_address": address,
            "metadata_server": "P2PHANDSHAKE",
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": 0,
        }
        flags = ("--hc-remote", "mooncake", "--hc-remote-config", json.dumps(options))
        yield Store(flags, (first, second))


def test_one_server_goes_on_with_what_another_computed(once: Once, store: Store) -> None:
    first, wanted = once(both_turns)
    tokens, stats = run_in_child(first_turn, "hidden", *store.flags)
    assert tokens == first
    assert stats["remote_saved_blocks"] == 4
    reply, stats = run_in_child(second_turn, "hidden", first, *store.flags)
    assert reply.storage == STORED == stats["restored_tokens"]
    assert stats["remote_loaded_blocks"] == 4
    assert reply.tokens == wanted
    assert stats["backend"] == "MooncakeStore"


def turn_after_a_loss(lost: int, *below: str) -> tuple:
    core = server("hidden", *below)
    first = core.ask(PROMPT, 60).tokens
    core.settle()
    os.kill(lost, signal.SIGKILL)
    assert core.scheduler.flush_cache()
    reply = core.ask(history(first), 24)
    return first, reply, core.tree.stats()


@pytest.mark.parametrize("which", [0, 1], ids=["master", "node"])
def test_a_store_that_is_lost_costs_only_the_cache(once: Once, store: Store, which: int) -> None:
    first, wanted = once(both_turns)
    tokens, reply, stats = run_in_child(turn_after_a_loss, store.processes[which], *store.flags)
    assert tokens == first
    assert reply.cached == 0
    assert reply.tokens == wanted
    reasons = ("remote_lookup_", "remote_read_")
    assert sum(count for name, count in stats.items() if name.startswith(reasons)) >= 1, stats
