"""Meetings over a remote store of files, alone and behind a disk; and a store that loses, damages
or keeps what it was given."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.remote.store import storage_key
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.core import Core, Reply, run_in_child
from support.disk_store import remove, store_of
from support.meetings import (
    BLOCKS,
    FAST,
    PROMPT,
    HeldDisk,
    Seen,
    check_moved,
    counted,
    meet,
    second_turn,
    server,
)
from support.prompts import in_store, on_disk
from support.waiting import HANGS_S

STORE_SECONDS = 1e-3
"""A token of a layer, as long as it takes to compute one."""


def start(form: str, profile: str, *flags: str, seconds: float | None = STORE_SECONDS) -> tuple:
    """A server of which only what lies below host memory holds the first turn; the second prompt,
    and the reply to the first."""
    core = server(form, profile, *flags, store_seconds=seconds)
    first = core.ask(PROMPT, 30).tokens
    core.forget()
    return core, second_turn(first), first


def both_turns(form: str, profile: str, folder: str) -> tuple:
    core, _, first = start(form, profile, *in_store(folder))
    return meet(core, first)


@pytest.mark.parametrize("form", ["hidden", "kv", "hidden:2,kv:2"])
def test_the_front_is_computed_while_the_store_sends_the_end(
    wanted: dict, profile: str, tmp_path: Path, form: str
) -> None:
    first, reply, seen = run_in_child(both_turns, form, profile, str(tmp_path))
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
    first, _, _ = run_in_child(both_turns, "kv", profile, str(tmp_path))
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
    disk = store_of(core)
    assert remove(disk, blocks_of(core, history)[5:]) == BLOCKS - 5
    HeldDisk(core)  # what is read comes in the pass that asks for it
    return counted(core, lambda: core.ask(history, 24))


def test_disk_and_store_are_read_at_the_same_time(
    wanted: dict, profile: str, tmp_path: Path
) -> None:
    """By the costs the disk takes as long for a block as computing one, the store half of it: while
    the disk reads three and the store six, two are computed, and what comes is restored."""
    reply, seen = run_in_child(behind_a_disk, profile, str(tmp_path / "s"), str(tmp_path / "d"))
    assert reply.tokens == wanted["kv"][1]
    assert seen["meetings"] == seen["meetings_restored"] == 1
    assert (seen["disk_loaded_blocks"], seen["remote_loaded_blocks"]) == (3, 6)
    assert reply.cached == reply.storage == 9 * BLOCK_TOKENS


def faults_at_each_block(profile: str, folder: str, kind: str) -> list[Seen]:
    """Serve the conversation with a fault at each of its blocks, from the last one down."""
    core, history, _ = start("hidden:2,kv:2", profile, *in_store(folder), seconds=FAST)
    remote = core.tree.tiers.disk._io
    path, asked = blocks_of(core, history), []
    read = remote.read

    def note(ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        asked.append(block_id)
        read(ticket, block_id, slot, deadline)

    remote.read = note
    found = []
    for block in reversed(range(BLOCKS)):
        asked.clear()
        while remote.contains(path) < BLOCKS:  # it asks the store, which has them all
            remote.ask(path)
            core.tree.tiers.poll()
            time.sleep(0.001)
        key = storage_key(remote._store._model, path[block])
        reply, counts = counted(core, lambda key=key: FAULTS[kind](core, history, key, folder))
        found.append(Seen(block, path[block] in asked, reply, counts))
        core.forget()
        remote._presence.clear()  # what it noted of the damaged block
    return found


def object_of(folder: str, key: str) -> Path:
    (file,) = Path(folder).glob(f"{key}*")
    return file


def damaged(core: Core, history: list[int], key: str, folder: str) -> Reply:
    """The object is damaged in the store until the request is over."""
    file = object_of(folder, key)
    good = file.read_bytes()
    middle = len(good) // 2
    file.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    reply = core.ask(history, 24)
    core.settle()  # it may still be read
    file.write_bytes(good)
    return reply


def lost(core: Core, history: list[int], key: str, folder: str) -> Reply:
    """The object is away until the request is over."""
    file = object_of(folder, key)
    away = file.rename(f"{file}.away")
    reply = core.ask(history, 24)
    core.settle()
    away.rename(file)
    return reply


def with_get(core: Core, history: list[int], get: Callable[..., Any]) -> Reply:
    """SGLang's back end reads an object by `get(read, key, page)`, where `read` really does."""
    storage = core.tree.tiers.disk._io._store._backend._storage
    read = storage.get
    storage.get = lambda key, page: get(read, key, page)
    reply = core.ask(history, 24)
    core.settle()
    storage.get = read
    return reply


def raises(core: Core, history: list[int], bad: str, *_: str) -> Reply:
    def get(read: Callable[..., Any], key: str, page: Any) -> Any:
        if key == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(key, page)

    return with_get(core, history, get)


def refuses(core: Core, history: list[int], bad: str, *_: str) -> Reply:
    return with_get(core, history, lambda read, key, page: None if key == bad else read(key, page))


def stalled(core: Core, history: list[int], key: str, *_: str) -> Reply:
    """The store does not answer for this object until the request is over."""
    backend, goes_on = core.tree.tiers.disk._io._store._backend, threading.Event()
    get: Callable[..., Any] = backend.get

    def wait(keys: Sequence[str], frames: Sequence[int]) -> Any:
        if key in keys:
            assert goes_on.wait(HANGS_S)
        return get(keys, frames)

    backend.get = wait
    rid = core.submit(history, 24)

    def resume(_: int) -> None:
        if rid in core.requests and core.requests[rid].finished():
            goes_on.set()

    core.run(each_pass=resume)
    goes_on.set()
    core.settle()
    backend.get = get
    return core.reply(rid)


FAULTS: dict[str, Callable[[Core, list[int], str, str], Reply]] = {
    "damage": damaged,
    "loss": lost,
    "EIO": raises,
    "refusal": refuses,
    "stall": stalled,
}


@pytest.mark.parametrize(
    ("kind", "counter"),
    [
        ("damage", "damaged"),
        ("loss", "missing"),
        ("EIO", "io_error"),
        ("refusal", "missing"),
        ("stall", None),
    ],
)
def test_a_fault_of_the_store_at_any_block_moves_the_meeting(
    wanted: dict, profile: str, tmp_path: Path, kind: str, counter: str | None
) -> None:
    found = run_in_child(faults_at_each_block, profile, str(tmp_path), kind)
    check_moved(found, wanted["hidden:2,kv:2"][1], "remote", counter)
