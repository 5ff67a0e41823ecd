"""Mooncake Store as the remote store: its real master, its storage node and client, on loopback.

Skipped where the package `mooncake` is not there; `scripts/try_mooncake.sh` fetches it first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from support.core import Core, run_in_child
from support.waiting import HANGS_S, until

FOUND = importlib.util.find_spec("mooncake")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(FOUND is None, reason="the package mooncake is not installed"),
]

FLAGS = ("--max-total-tokens", "640", "--hc-host-size-gb", "0.2", "--dtype", "float32")
PROMPT = random.Random(3).choices(range(3, 900), k=200)
FOLLOW = random.Random(4).choices(range(3, 900), k=20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    """options: of `--hc-remote mooncake`. processes: ids of the master and of the node."""

    options: dict[str, object]
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
        options: dict[str, object] = {
            "master_server_address": address,
            "metadata_server": "P2PHANDSHAKE",
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": 0,
        }
        yield Store(options, (first, second))


def server(options: dict[str, object]) -> Core:
    remote = ("--hc-remote", "mooncake", "--hc-remote-config", json.dumps(options))
    return Core("--hc-forms", "hidden", *remote, *FLAGS)


def first_turn(options: dict[str, object]) -> tuple:
    core = server(options)
    reply = core.ask(PROMPT, 60)
    core.settle()
    return reply.tokens, core.tree.stats()


def second_turn(options: dict[str, object], history: list[int]) -> tuple:
    core = server(options)
    reply = core.ask(history, 24)
    core.settle()
    return reply, core.tree.stats(), type(core.tree.cache_controller.storage_backend).__name__


def both_turns() -> tuple[list[int], list[int]]:
    """A server that never stopped and never evicted."""
    core = Core("--hc-forms", "hidden", *FLAGS)
    first = core.ask(PROMPT, 60).tokens
    return first, core.ask([*PROMPT, *first, *FOLLOW], 24).tokens


def test_one_server_goes_on_with_what_another_computed(models: None, store: Store) -> None:
    first, wanted = run_in_child(both_turns)
    tokens, stats = run_in_child(first_turn, store.options)
    assert tokens == first
    assert stats["remote_saved_blocks"] == 4
    reply, stats, shown = run_in_child(second_turn, store.options, [*PROMPT, *first, *FOLLOW])
    assert reply.storage == 256 == stats["restored_tokens"]
    assert stats["remote_loaded_blocks"] == 4
    assert reply.tokens == wanted
    assert shown == "MooncakeStore"


def turn_after_a_loss(options: dict[str, object], lost: int) -> tuple:
    core = server(options)
    first = core.ask(PROMPT, 60).tokens
    core.settle()
    os.kill(lost, signal.SIGKILL)
    assert core.scheduler.flush_cache()
    reply = core.ask([*PROMPT, *first, *FOLLOW], 24)
    return first, reply, core.tree.stats()


@pytest.mark.parametrize("which", [0, 1], ids=["master", "node"])
def test_a_store_that_is_lost_costs_only_the_cache(models: None, store: Store, which: int) -> None:
    first, wanted = run_in_child(both_turns)
    tokens, reply, stats = run_in_child(turn_after_a_loss, store.options, store.processes[which])
    assert tokens == first
    assert reply.cached == 0
    assert reply.tokens == wanted
    reasons = ("remote_lookup_", "remote_read_")
    assert sum(count for name, count in stats.items() if name.startswith(reasons)) >= 1, stats
