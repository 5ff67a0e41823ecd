"""Meetings over a real disk that flips bits, fails, or stands still at any block of the history.

The bytes lie in block files and are read by the disk's own threads; only the fault is made by the
test. Whatever happens, the tokens are those of a server that never evicted, no slot is lost
(`counted`), and the fault is counted once.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.core import Core, Reply, run_in_child
from support.disk_store import Faults, open_with, store_of
from support.meetings import (
    BLOCKS,
    FAST,
    HeldDisk,
    Seen,
    check_moved,
    counted,
    halving_profile,
    second_turn,
    server,
    start,
)
from support.prompts import on_disk
from support.waiting import HANGS_S

FORM = "hidden:2,kv:2"


class Range(NamedTuple):
    """Bytes [begin, end) of a block's file."""

    path: Path
    begin: int
    end: int

    def overlaps(self, path: str, begin: int, end: int) -> bool:
        return Path(path) == self.path and begin < self.end and self.begin < end

    def flip(self) -> None:
        """A bit in the middle."""
        with self.path.open("r+b") as file:
            file.seek((self.begin + self.end) // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


class Disk:
    """The disk of a server in this process, and the identities of the conversation's blocks."""

    def __init__(self, core: Core, history: list[int]) -> None:
        self._store, below = store_of(core), core.tree.tiers.disk._io
        stored = Prefix(None, pack_tokens(history))
        self.path = core.tree.tiers.host.tree.identities(stored)[:BLOCKS]
        self.asked: list[bytes] = []
        read = below.read

        def note(ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
            self.asked.append(block_id)
            read(ticket, block_id, slot, deadline)

        below.read = note

    def where(self, block: int) -> Range:
        """The file of a block, which is on disk."""
        store = self._store
        assert store.contains(self.path) == BLOCKS
        directory = store.directory_of(self.path[block])
        return Range(Path(directory.path(self.path[block])), 0, store.model.file_bytes)


def faulty_server(folder: str, profile: str) -> tuple[Core, Faults, list[int]]:
    """A server whose disk alone holds the first turn, that disk's faults, the second prompt."""
    faults = Faults()
    open_with(faults)
    core, first = start(FORM, folder, profile)
    return core, faults, second_turn(first)


def each_block(
    core: Core, disk: Disk, ask: Callable[[Range], tuple[Reply, dict[str, int]]]
) -> list[Seen]:
    """Serve the conversation with a fault at each of its blocks, from the last one down."""
    found = []
    for block in reversed(range(BLOCKS)):
        disk.asked.clear()
        reply, counts = ask(disk.where(block))
        found.append(Seen(block, disk.path[block] in disk.asked, reply, counts))
        core.forget()
    return found


def flipped_bits(folder: str, profile: str) -> list[Seen]:
    core, _, history = faulty_server(folder, profile)
    disk = Disk(core, history)

    def ask(where: Range) -> tuple[Reply, dict[str, int]]:
        where.flip()
        found = counted(core, lambda: core.ask(history, 24))
        if "disk_read_damaged" not in found[1]:  # nobody has seen it: it is still served from there
            where.flip()
        return found

    return each_block(core, disk, ask)


def failing_reads(folder: str, profile: str) -> list[Seen]:
    core, faults, history = faulty_server(folder, profile)

    def ask(where: Range) -> tuple[Reply, dict[str, int]]:
        def fail(path: str, begin: int, end: int) -> None:
            if where.overlaps(path, begin, end):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        faults.on_range = fail
        try:
            return counted(core, lambda: core.ask(history, 24))
        finally:
            faults.on_range = Faults().on_range

    return each_block(core, Disk(core, history), ask)


def stalled_reads(folder: str, profile: str) -> list[Seen]:
    """The read of a block stands still until the request is over, and ends well then."""
    core, faults, history = faulty_server(folder, profile)

    def ask(where: Range) -> tuple[Reply, dict[str, int]]:
        goes_on = threading.Event()

        def wait(path: str, begin: int, end: int) -> None:
            if where.overlaps(path, begin, end):
                assert goes_on.wait(HANGS_S)

        faults.on_range = wait
        rid = core.submit(history, 24)

        def resume(_: int) -> None:
            if rid in core.requests and core.requests[rid].finished():
                goes_on.set()

        def serve() -> Reply:
            core.run(each_pass=resume)
            goes_on.set()
            return core.reply(rid)

        try:
            return counted(core, serve)
        finally:
            faults.on_range = Faults().on_range

    return each_block(core, Disk(core, history), ask)


@pytest.mark.parametrize(
    ("body", "counter"),
    [
        (flipped_bits, "damaged"),
        (failing_reads, "io_error"),
        (stalled_reads, None),
    ],
)
def test_a_fault_of_the_disk_at_any_block_moves_the_meeting(
    wanted: dict, tmp_path: Path, body: Callable[..., list[Seen]], counter: str | None
) -> None:
    profile = halving_profile(tmp_path, FAST)
    found = run_in_child(body, str(tmp_path / "d"), profile)
    check_moved(found, wanted[FORM][1], "disk", counter)
    if counter is not None:
        early = [one.counts.get("early_restored_tokens", 0) for one in found if one.read]
        assert any(early), "what had come by then was restored before it was needed"


def saved(folder: str, profile: str) -> list[int]:
    core, first = start(FORM, folder, profile)
    core.tree.tiers.close()
    return first


def restarted(folder: str, profile: str, first: list[int]) -> tuple:
    core = server(FORM, profile, *on_disk(folder))
    HeldDisk(core)  # what is asked for comes in the next pass, however busy the machine is
    return counted(core, lambda: core.ask(second_turn(first), 24))


def test_a_restarted_server_meets_what_its_disk_has_kept(
    wanted: dict, profile: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "d")
    first = run_in_child(saved, folder, profile)
    reply, seen = run_in_child(restarted, folder, profile, first)
    assert (first, reply.tokens) == wanted[FORM]
    assert seen["meetings"] == seen["meetings_restored"] == 1
    assert 0 < reply.cached == reply.storage == seen["restored_tokens"] < BLOCKS * BLOCK_TOKENS
    assert seen["disk_loaded_blocks"] >= reply.cached // BLOCK_TOKENS
