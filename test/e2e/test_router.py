"""A published router that reads our KV events sends a conversation that comes back to the replica
that still holds it, in whichever tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.harness.server import ServerProcess
from support.kv_events import Ports
from support.prompts import prompt
from support.ranked_core import ENV
from support.router import DeviceOnly, Router, needs_router
from support.served import ask_replica, start
from support.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.slow]

TALKS, PAGE = 40, 16
GROUPS = ("tiers", "device", "off")
"""What the router is told: everything, of the device alone, nothing."""


def talk(server: ServerProcess) -> list[list[int]]:
    """A first turn of each conversation, on the replicas by turns. Returns the histories."""
    found = []
    for number in range(TALKS):
        tokens = prompt(100 + number, 200)
        found.append([*tokens, *ask_replica(server, tokens, number % 2)[0], *prompt(number, 20)])
    return found


def test_the_replica_that_holds_a_conversation_gets_it(models: None, tmp_path: Path) -> None:
    needs_router()
    ports, silent = Ports(), Ports()
    flags = "--dp-size", "2", "--page-size", str(PAGE), "--hc-host-size-gb", "0.4", *ports.flags
    with (
        start(tmp_path / "log", *flags, env=ENV) as server,
        Router(tmp_path / "router") as router,
    ):
        for replica in (0, 1):
            events, replays = ports.address(replica), ports.replay_address(replica)
            router.register("tiers", replica, events, replays, PAGE, replica)
            router.register(
                "device", replica, DeviceOnly(ports, replica).address, None, PAGE, replica
            )
            router.register("off", replica, silent.address(replica), None, PAGE, replica)
        histories = talk(server)
        until(lambda: is_known(router, histories), pause=0.1)
        homes = [number % 2 for number in range(TALKS)]
        kept = {group: 0 for group in GROUPS}
        for home, history in zip(homes, histories, strict=True):
            for group in GROUPS:
                kept[group] += router.choose(group, history) == home
        restored = 0
        for history in histories:
            found = ask_replica(server, history, router.choose("tiers", history))[1]
            restored += found.get("host", 0) + found.get("device", 0) >= 192
    print(f"of {TALKS} conversations the replica that holds it: {kept}; restored {restored}")
    assert kept["tiers"] >= 0.95 * TALKS and restored >= 0.95 * TALKS
    assert max(kept["device"], kept["off"]) <= 0.75 * TALKS


def is_known(router: Router, histories: list[list[int]]) -> bool:
    """Whether the router has heard of all that left the devices."""
    for number, history in enumerate(histories):
        if router.known("tiers", history)[number % 2]["host_pinned_blocks"] < 192 // PAGE:
            return False
    return True
