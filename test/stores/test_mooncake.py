"""Mooncake Store as the remote store under SGLang's real scheduler: its real master, metadata
server, node and client on loopback. Whatever happens to it costs the cache and is counted."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.queue import meeting, prefetch
from sglang_hc.srt.arguments.storage_backends import open_remote
from sglang_hc.store import known_blocks, lower_tier
from sglang_hc.store.disk.format import StoredModel
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote import CALLS, Frames
from sglang_hc.store.remote.store import storage_key
from support.core import Core, run_in_child
from support.mooncake import LEASE_MS, MASTER, NODE, Mooncake, needs_mooncake
from support.remote import FOREVER, blocks_over, make_path, wait
from support.slow_path import SlowPath
from support.two_servers import (
    PROMPT,
    STORED,
    both_turns,
    first_turn,
    history,
    second_turn,
    server,
)
from support.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.slow, needs_mooncake]

Replies = tuple[list[int], list[int]]

PATIENCE = [
    (module, name, getattr(module, name))
    for module, name in (
        (known_blocks, "LOOKUP_S"),
        (lower_tier, "READ_DEADLINE_S"),
        (meeting, "PATIENCE"),
        (prefetch, "PATIENCE"),
    )
]
"""As a server has it; an engine of the tests waits for ever."""


@pytest.fixture(scope="module")
def replies(models: None) -> Replies:
    """Of a server that never forgot."""
    both: Replies = run_in_child(both_turns)
    return both


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Mooncake]:
    with Mooncake(tmp_path) as store:
        yield store


def troubles(stats: dict[str, Any]) -> dict[str, int]:
    """What was counted of reads, look-ups and writes that did not end well."""
    reasons = ("lookup_", "read_", "write_", "hangs", "pauses", "foreign", "unknown_version")
    names = tuple(f"remote_{reason}" for reason in reasons)
    return {name: count for name, count in stats.items() if count and name.startswith(names)}


def test_one_server_goes_on_with_what_another_computed(replies: Replies, store: Mooncake) -> None:
    first, wanted = replies
    tokens, stats = run_in_child(first_turn, "hidden", *store.flags())
    assert tokens == first
    assert stats["remote_saved_blocks"] == 4
    reply, stats = run_in_child(second_turn, "hidden", first, *store.flags())
    assert reply.storage == STORED == stats["restored_tokens"]
    assert stats["remote_loaded_blocks"] == 4
    assert reply.tokens == wanted
    assert stats["backend"] == "MooncakeStore" and not troubles(stats)


def test_a_store_with_long_round_trips_is_only_slow(replies: Replies, store: Mooncake) -> None:
    first, wanted = replies
    path = SlowPath(int(store.master.split(":")[1]), 0.05)
    flags = store.flags(master_server_address=path.address)
    run_in_child(first_turn, "kv", *flags)
    reply, stats = run_in_child(second_turn, "kv", first, *flags)
    assert reply.tokens == wanted and reply.storage == STORED and not troubles(stats)


# -- faults between the turns of one server ------------------------------------------------------


def blocks_of(core: Core) -> Any:
    """What the server knows of the store: `KnownBlocks`."""
    return core.tree.tiers.disk._io


def turn_behind(fault: Callable[[Core], object], *below: str) -> tuple[Any, ...]:
    """A second turn when nothing is left on the device or in host memory, and a fault came
    meanwhile."""
    core = server("hidden", *below)
    first = core.ask(PROMPT, 60).tokens
    core.forget()
    assert core.tree.stats()["remote_saved_blocks"] == 4
    fault(core)
    reply = core.ask(history(first), 24)
    core.settle()
    return first, reply, core.tree.stats()


def signalled(pid: int, number: signal.Signals, forgets: bool, core: Core) -> None:
    """forgets: the server does not remember what is in the store, so it asks."""
    for module, name, seconds in PATIENCE:
        setattr(module, name, seconds)
    os.kill(pid, number)
    if forgets:
        blocks_of(core)._presence.clear()


@pytest.mark.parametrize("forgets", [False, True], ids=["believed", "asked"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["lost", "hangs"])
@pytest.mark.parametrize("program", [MASTER, NODE])
def test_a_store_that_is_lost_or_hangs_costs_only_the_cache(
    replies: Replies, store: Mooncake, program: str, number: signal.Signals, forgets: bool
) -> None:
    first, wanted = replies
    fault = partial(signalled, store.pid(program), number, forgets)
    tokens, reply, stats = run_in_child(turn_behind, fault, *store.flags())
    assert tokens == first and reply.tokens == wanted
    assert reply.cached < STORED and troubles(stats), stats


def rewrite(change: Callable[[bytes], bytes], core: Core) -> None:
    """What is in the store becomes something else under the same names."""
    known = blocks_of(core)
    client = known._store._backend._storage.store
    for name in list(known._presence._found):
        key = storage_key(known._store._model, name) + "__k"
        value = client.get(key)
        assert value
        until(lambda key=key: client.remove(key) == 0, pause=0.1)  # its lease ends first
        assert client.put(key, change(value)) == 0


def other_version(value: bytes) -> bytes:
    return value[:8] + bytes([value[8] + 1]) + value[9:]


def other_bytes(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


def shorter(value: bytes) -> bytes:
    return value[: len(value) // 2]


@pytest.mark.parametrize(
    ("change", "counted"),
    [
        (other_version, "remote_unknown_version"),
        (other_bytes, "remote_read_damaged"),
        (shorter, "remote_read_"),
    ],
)
def test_what_is_not_the_block_is_recomputed(
    replies: Replies, store: Mooncake, change: Callable[[bytes], bytes], counted: str
) -> None:
    first, wanted = replies
    tokens, reply, stats = run_in_child(turn_behind, partial(rewrite, change), *store.flags())
    assert tokens == first and reply.tokens == wanted and reply.cached == 0
    assert any(name.startswith(counted) for name in troubles(stats)), stats


# -- a store that is full ------------------------------------------------------------------------

BURSTS, BURST = 12, 8
"""The node has room for some sixty of these blocks."""


def crowded(flags: tuple[str, ...]) -> tuple[list[Outcome], Outcome, Outcome]:
    """Outcomes of writing more blocks than fit, at the pace of conversations, and of reading the
    first and the last of them."""
    layout = BlockLayout(LayerPlan(0, 8, 0), StateShape(8, 512, (1, 1), "uint8"))
    model = StoredModel.of(layout.chunks(), layout.fingerprint("toy"), "toy")
    frames = Frames(model.header_bytes, model.block_bytes, CALLS)
    backend = open_remote("mooncake", json.loads(flags[3]), frames)
    pool = HostPool(layout, BURST)
    pool.bytes[:] = 7
    io = blocks_over(backend, frames, pool, model)
    path = make_path(BURSTS * BURST)
    outcomes = []
    for first in range(0, len(path), BURST):
        for slot, block in enumerate(path[first : first + BURST]):
            io.write(slot, block, slot, FOREVER)
        outcomes += [done.outcome for done in wait(io, BURST)]
        time.sleep(2 * LEASE_MS / 1e3)  # nothing is evicted before its lease ends
    read = []
    for block in (path[0], path[-1]):
        io.read(1, block.block_id, 0, FOREVER)
        read.append(wait(io, 1)[0].outcome)
    io.close()
    return outcomes, read[0], read[1]


def test_a_full_store_keeps_what_is_new(tmp_path: Path) -> None:
    """What it evicts is its own choice, and found missing."""
    with Mooncake(tmp_path, node_mb=16) as store:
        outcomes, first, last = run_in_child(crowded, store.flags())
    assert outcomes == [Outcome.OK] * (BURSTS * BURST)
    assert (first, last) == (Outcome.MISSING, Outcome.OK)
