"""Meetings over a real disk, and over a remote store of files, of which any block of the history is
damaged, lost, unreadable or late.

The bytes lie in files and are read by the threads of the disk or the store; only the fault is made
by the test. Whatever happens, the tokens are those of a server that never evicted, no slot is lost
(`counted`), and the fault is counted once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple
from unittest import mock

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.remote.store import storage_key
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.core import Core, Reply, run_in_child
from support.disk_store import EIO, Faults, Hook, open_with, store_of
from support.file_ranges import Range
from support.meetings import (
    BLOCKS,
    FAST,
    PROMPT,
    Replies,
    counted,
    halving_profile,
    second_turn,
    server,
)
from support.prompts import in_store, on_disk
from support.waiting import HANGS_S, until

FORM = "hidden:2,kv:2"

Fault = Callable[[int, Event], AbstractContextManager[object]]
"""Holds while a request is served. It gets the number of a block, and what is set when the request
is over."""


class Seen(NamedTuple):
    """The second turn with a fault at `block`. read: the block was asked for."""

    block: int
    read: bool
    reply: Reply
    counts: dict[str, int]


def start(profile: str, *below: str) -> tuple[Core, list[int], list[bytes]]:
    """A server of which only what lies below host memory holds the first turn; the second prompt,
    and the identities of its blocks that are stored."""
    core = server(FORM, profile, *below, store_seconds=FAST)
    history = second_turn(core.ask(PROMPT, 30).tokens)
    core.forget()
    stored = Prefix(None, pack_tokens(history))
    return core, history, core.tree.tiers.host.tree.identities(stored)[:BLOCKS]


def each_block(core: Core, history: list[int], path: Sequence[bytes], fault: Fault) -> list[Seen]:
    """Serve the conversation with a fault at each of its blocks, from the last one down."""
    below, asked, found = core.tree.tiers.disk._io, [], []
    read = below.read

    def note(ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        asked.append(block_id)
        read(ticket, block_id, slot, deadline)

    def serve(block: int) -> Reply:
        over = Event()
        with fault(block, over):
            rid = core.submit(history, 24)

            def look(_: int) -> None:
                if rid in core.requests and core.requests[rid].finished():
                    over.set()

            core.run(each_pass=look)
            over.set()
            core.settle()  # the block may still be read
        return core.reply(rid)

    with mock.patch.object(below, "read", note):
        for block in reversed(range(BLOCKS)):
            asked.clear()
            reply, counts = counted(core, lambda block=block: serve(block))
            found.append(Seen(block, path[block] in asked, reply, counts))
            core.forget()
    return found


def wait_for(over: Event) -> None:
    assert over.wait(HANGS_S)


def of_disk(folder: str, profile: str) -> dict[str, list[Seen]]:
    """By the kind of the fault."""
    faults = Faults()
    open_with(faults)
    core, history, path = start(profile, *on_disk(folder))
    store = store_of(core)

    def where(block: int) -> Range:
        assert store.contains(path) == BLOCKS
        directory = store.directory_of(path[block])
        return Range(Path(directory.path(path[block])), 0, store.model.file_bytes)

    @contextmanager
    def damage(block: int, over: Event) -> Iterator[None]:
        file, before = where(block), core.tree.stats().get("disk_read_damaged", 0)
        file.flip()
        yield
        if core.tree.stats().get("disk_read_damaged", 0) == before:  # it is still served from there
            file.flip()

    @contextmanager
    def in_reads(block: int, hook: Hook) -> Iterator[None]:
        file = where(block)

        def strike(path: str, begin: int, end: int) -> None:
            if file.overlaps(path, begin, end):
                hook(path)

        with mock.patch.object(faults, "on_range", strike):
            yield

    kinds: dict[str, Fault] = {
        "damage": damage,
        "EIO": lambda block, over: in_reads(block, EIO),
        "stall": lambda block, over: in_reads(block, lambda path: wait_for(over)),
    }
    return {kind: each_block(core, history, path, fault) for kind, fault in kinds.items()}


def of_store(folder: str, profile: str) -> dict[str, list[Seen]]:
    """By the kind of the fault."""
    core, history, path = start(profile, *in_store(folder))
    remote = core.tree.tiers.disk._io
    backend = remote._store._backend
    storage = backend._storage
    get, fetch = backend.get, storage.get

    def key_of(block: int) -> str:
        return storage_key(remote._store._model, path[block])

    def file_of(block: int) -> Path:
        (file,) = Path(folder).glob(f"{key_of(block)}*")
        return file

    @contextmanager
    def damage(block: int, over: Event) -> Iterator[None]:
        file = file_of(block)
        good = file.read_bytes()
        Range(file, 0, len(good)).flip()
        yield
        file.write_bytes(good)

    @contextmanager
    def loss(block: int, over: Event) -> Iterator[None]:
        file = file_of(block)
        away = file.rename(f"{file}.away")
        yield
        away.rename(file)

    def fails(block: int, answer: Callable[[], object]) -> AbstractContextManager[object]:
        """SGLang's back end raises or gives nothing when it is asked for the block."""
        bad = key_of(block)
        return mock.patch.object(
            storage, "get", lambda key, page: answer() if key == bad else fetch(key, page)
        )

    def raise_eio() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def stall(block: int, over: Event) -> AbstractContextManager[object]:
        def wait(keys: Sequence[str], frames: Sequence[int]) -> Any:
            if key_of(block) in keys:
                wait_for(over)
            return get(keys, frames)

        return mock.patch.object(backend, "get", wait)

    def ask_the_store() -> None:
        remote.ask(path)
        core.tree.tiers.poll()

    def known(fault: Fault) -> Fault:
        """The server knows that the store has all blocks, whatever the last fault told it."""

        @contextmanager
        def one(block: int, over: Event) -> Iterator[None]:
            remote._presence.clear()
            until(lambda: remote.contains(path) == BLOCKS, ask_the_store)
            with fault(block, over):
                yield

        return one

    kinds: dict[str, Fault] = {
        "damage": damage,
        "loss": loss,
        "EIO": lambda block, over: fails(block, raise_eio),
        "refusal": lambda block, over: fails(block, lambda: None),
        "stall": stall,
    }
    return {kind: each_block(core, history, path, known(fault)) for kind, fault in kinds.items()}


COUNTERS = {
    "damage": "damaged", "loss": "missing", "EIO": "io_error", "refusal": "missing", "stall": None,
}  # fmt: skip
"""What is counted; nothing where reads stand still and end well."""


@pytest.mark.parametrize(
    ("body", "tier"),
    [(of_disk, "disk"), pytest.param(of_store, "remote", marks=pytest.mark.slow)],
)
def test_a_fault_at_any_block_moves_the_meeting(
    wanted: Replies, tmp_path: Path, body: Callable[..., dict[str, list[Seen]]], tier: str
) -> None:
    found = run_in_child(body, str(tmp_path / "d"), halving_profile(tmp_path, FAST))
    for kind, seen in found.items():
        check_moved(seen, wanted[1], tier, COUNTERS[kind])
        if tier == "disk" and COUNTERS[kind] is not None:
            early = [one.counts.get("early_restored_tokens", 0) for one in seen if one.read]
            assert any(early), "what had come by then was restored before it was needed"


def check_moved(found: list[Seen], tokens: list[int], tier: str, counter: str | None) -> None:
    """The meeting has moved behind each block. tokens: of the reply without a fault."""
    for block, read, reply, counts in found:
        assert reply.tokens == tokens, block
        assert counts["meetings"] == 1, block
        failures = {name: n for name, n in counts.items() if name.startswith(f"{tier}_read_")}
        assert failures == ({f"{tier}_read_{counter}": 1} if read and counter else {}), block
        if read:  # everything up to the end of the block is computed
            assert reply.cached <= (BLOCKS - 1 - block) * BLOCK_TOKENS, block
    assert sum(one.read for one in found) >= BLOCKS - 2
    if counter is not None:  # a source that stands still has all that was asked for with it
        restored = any(one.reply.cached > 0 for one in found if one.read)
        assert restored, "what lies behind is restored"
