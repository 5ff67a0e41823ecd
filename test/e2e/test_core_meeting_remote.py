"""Meetings over a remote store of files, alone and behind a disk; and a store that loses, damages
or keeps what it was given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.remote.envelope import storage_key
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.core import Core, Reply, run_in_child
from support.meetings import (
    BLOCKS,
    PROMPT,
    counted,
    forget,
    in_store,
    on_disk,
    run,
    second_turn,
    server,
)

STORE_SECONDS = 1e-3
"""A token of a layer, as long as it takes to compute one."""


def start(form: str, profile: str, *flags: str, seconds: float | None = STORE_SECONDS) -> tuple:
    """A server of which only what lies below host memory holds the first turn; the second prompt,
    and the reply to the first."""
    core = server(form, profile, *flags, store_seconds=seconds)
    first = core.ask(PROMPT, 30).tokens
    forget(core)
    return core, second_turn(first), first


def meet(form: str, profile: str, folder: str) -> tuple:
    core, history, first = start(form, profile, *in_store(folder))
    reply, seen = counted(core, lambda: core.ask(history, 24))
    assert core.scheduler.flush_cache(), "what was restored can be forgotten"
    return first, reply, seen


@pytest.mark.parametrize("form", ["hidden", "kv", "hidden:2,kv:2"])
def test_the_front_is_computed_while_the_store_sends_the_end(
    wanted: dict, profile: str, tmp_path: Path, form: str
) -> None:
    first, reply, seen = run_in_child(meet, form, profile, str(tmp_path))
    assert (first, reply.tokens) == wanted[form]
    assert seen["meetings"] == seen["meetings_restored"] == 1
    assert 0 < reply.cached == reply.storage == seen["restored_tokens"] < BLOCKS * BLOCK_TOKENS
    assert seen["remote_loaded_blocks"] >= reply.cached // BLOCK_TOKENS
    assert "hole" not in seen and "gap" not in seen, "the state behind the meeting is saved"


def another_server(profile: str, folder: str, history: list[int]) -> tuple:
    core = server("kv", profile, *in_store(folder), store_seconds=STORE_SECONDS)
    return counted(core, lambda: core.ask(history, 24))


def test_another_server_meets_what_one_has_stored(
    wanted: dict, profile: str, tmp_path: Path
) -> None:
    first, _, _ = run_in_child(meet, "kv", profile, str(tmp_path))
    reply, seen = run_in_child(another_server, profile, str(tmp_path), second_turn(first))
    assert reply.tokens == wanted["kv"][1]
    assert seen["meetings_restored"] == 1 and reply.storage > 0


def of_unknown_speed(profile: str, folder: str) -> tuple:
    core, history, _ = start("kv", profile, *in_store(folder), seconds=None)
    return counted(core, lambda: core.ask(history, 24))


def test_a_store_whose_speed_nobody_has_seen_is_read_whole(
    wanted: dict, profile: str, tmp_path: Path
) -> None:
    """Though the profile knows the disk's: that one is not the store's."""
    reply, seen = run_in_child(of_unknown_speed, profile, str(tmp_path))
    assert reply.tokens == wanted["kv"][1]
    assert reply.storage == BLOCKS * BLOCK_TOKENS
    assert "meetings" not in seen and "restore_reason_slow_tier" not in seen


def blocks_of(core: Core, history: list[int]) -> list[bytes]:
    names: list[bytes] = core.tree.tiers.host.tree.identities(Prefix(None, pack_tokens(history)))
    return names[:BLOCKS]


def behind_a_disk(profile: str, shared: str, folder: str) -> tuple:
    """The disk has the first five blocks, the store, which is twice as fast, all of them."""
    flags = (*on_disk(folder), *in_store(shared))
    core, history, _ = start("kv", profile, *flags, seconds=STORE_SECONDS / 2)
    disk = core.tree.tiers.disk._io._near._store
    assert disk.remove(blocks_of(core, history)[5:]) == BLOCKS - 5
    return counted(core, lambda: core.ask(history, 24))


def test_disk_and_store_are_read_at_the_same_time(
    wanted: dict, profile: str, tmp_path: Path
) -> None:
    """By the costs half a second of each second of compute: three blocks are computed while the
    disk reads two and the store six."""
    reply, seen = run_in_child(behind_a_disk, profile, str(tmp_path / "s"), str(tmp_path / "d"))
    assert reply.tokens == wanted["kv"][1]
    assert seen["meetings"] == seen["meetings_restored"] == 1
    assert (seen["disk_loaded_blocks"], seen["remote_loaded_blocks"]) == (2, 6)
    assert reply.cached == reply.storage == 8 * BLOCK_TOKENS


class Seen(NamedTuple):
    """One request with a fault at `block`. read: the block was asked for."""

    block: int
    read: bool
    reply: Reply
    counts: dict[str, int]


def faults_at_each_block(profile: str, folder: str, kind: str) -> list[Seen]:
    """Serve the conversation with a fault at each of its blocks, from the last one down."""
    core, history, _ = start("hidden:2,kv:2", profile, *in_store(folder))
    remote = core.tree.tiers.disk._io
    path, asked = blocks_of(core, history), []
    read = remote.read

    def note(ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        asked.append(block_id)
        read(ticket, block_id, slot, deadline)

    remote.read = note
    serve = stalled if kind == "stall" else spoiled
    found = []
    for block in reversed(range(BLOCKS)):
        asked.clear()
        while remote.contains(path) < BLOCKS:  # it asks the store, which has them all
            remote.ask(path)
            core.tree.tiers.poll()
            time.sleep(0.001)
        key = storage_key(remote._fingerprint, path[block])
        reply, counts = counted(core, lambda key=key: serve(core, history, key, kind, folder))
        found.append(Seen(block, path[block] in asked, reply, counts))
        forget(core)
        remote._presence.clear()  # what it noted of the damaged block
    return found


def spoiled(core: Core, history: list[int], key: str, kind: str, folder: str) -> Reply:
    """The object is damaged or lost in the store until the request is over."""
    (file,) = Path(folder, "sglang-hc").glob(f"{key}*")
    good = file.read_bytes()
    if kind == "damage":
        middle = len(good) // 2
        file.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    else:
        file.rename(f"{file}.away")
    reply = core.ask(history, 24)
    core.settle()  # it may still be read
    Path(f"{file}.away").unlink(missing_ok=True)
    file.write_bytes(good)
    return reply


def stalled(core: Core, history: list[int], key: str, *_: str) -> Reply:
    """The store does not answer for this object until the request is over."""
    backend, goes_on = core.tree.tiers.disk._io._backend, threading.Event()
    get: Callable[..., Any] = backend.get

    def wait(keys: Sequence[str], frames: Sequence[int]) -> Any:
        if key in keys:
            assert goes_on.wait(60)
        return get(keys, frames)

    backend.get = wait
    rid = core.submit(history, 24)

    def resume(_: int) -> None:
        if rid in core.requests and core.requests[rid].finished():
            goes_on.set()

    run(core, resume)
    goes_on.set()
    core.settle()
    backend.get = get
    return core.reply(rid)


@pytest.mark.parametrize(
    ("kind", "counter"),
    [("damage", "remote_read_damaged"), ("loss", "remote_read_missing"), ("stall", None)],
)
def test_a_fault_of_the_store_at_any_block_moves_the_meeting(
    wanted: dict, profile: str, tmp_path: Path, kind: str, counter: str | None
) -> None:
    found = run_in_child(faults_at_each_block, profile, str(tmp_path), kind)
    for block, read, reply, counts in found:
        assert reply.tokens == wanted["hidden:2,kv:2"][1], block
        assert counts["meetings"] == 1, block
        failures = {name: n for name, n in counts.items() if name.startswith("remote_read_")}
        assert failures == ({counter: 1} if read and counter else {}), block
        if read:  # everything up to the end of the block is computed
            assert reply.cached <= (BLOCKS - 1 - block) * BLOCK_TOKENS, block
    assert sum(one.read for one in found) >= 5
    if counter is not None:  # a store that stands still has all that was asked for with it
        assert any(one.reply.cached > 0 for one in found if one.read)
