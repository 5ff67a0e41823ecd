"""The real thing: processes killed with SIGKILL while they write, and what is found afterwards."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.store.outcome import Outcome
from support.disk_store import copy_index, data_of, make_path, open_store, put, read_bytes

SIZE = 60_000_000
"""Room for about 1,500 blocks."""

MOST_PATHS = 50
"""Of eight blocks: as many as one child writes. They and FOLDER_BLOCKS are far below the room."""

FOLDER_BLOCKS = 300
"""So many acknowledged blocks are enough for one folder."""


def write_until_killed(folder: Path, turn: int, log: int) -> None:
    """In a child process: two threads write paths and note each block once it is acknowledged.
    What they write leaves room however late the kill comes."""
    store = open_store(folder, size=SIZE, background=True)

    def write(number: int) -> None:
        blocks = make_path(8, seed=turn * 100_000 + number)
        for block, answer in zip(blocks, put(store, blocks), strict=True):
            if answer is Outcome.OK:
                os.write(log, block.block_id)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, range(MOST_PATHS)))
    signal.pause()


def committed_rows(folder: Path, scratch: Path) -> set[bytes]:
    """Identities of the blocks whose rows were committed, seen in a copy: to look at the index
    itself would already recover it. None when the kill came before there was a table."""
    copy = scratch / "committed.sqlite"
    with suppress(FileNotFoundError, sqlite3.OperationalError):
        copy_index(folder / "sglang-hc" / "index.sqlite", copy, None)
        with closing(sqlite3.connect(copy)) as connection:
            return {name for (name,) in connection.execute("SELECT block_id FROM blocks")}
    return set()


def kill_and_check(folder: Path, turn: int, rng: random.Random, noted: set[bytes]) -> int:
    """Kill a writer, then find every block that it noted (added to `noted`) or committed, and
    verify every block that is served. Returns how many were committed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            write_until_killed(folder, turn, writer)
        finally:
            os._exit(1)
    os.close(writer)
    wanted = 16 * rng.randrange(2, 20) if turn % 4 else 0  # every fourth dies at its beginning
    with os.fdopen(reader, "rb") as pipe:
        acknowledged = pipe.read(wanted)
        time.sleep(rng.random() * 0.05)  # the kill may come anywhere between two of them
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        acknowledged += pipe.read()
    noted |= {acknowledged[i : i + 16] for i in range(0, len(acknowledged), 16)}
    committed = committed_rows(folder, folder.parent)
    store = open_store(folder, size=SIZE)
    present = set(store.block_ids())
    assert len(present) < 1000, "near eviction, where blocks may go"
    assert noted <= committed, "a block was acknowledged before its row was committed"
    assert committed <= present, "a block whose row was committed is lost"
    for name in present:
        status, got = read_bytes(store, name)
        assert status is Outcome.OK, "a block was found that does not verify"
        assert np.array_equal(got, data_of(name))
    store.check_integrity()
    store.close()
    return len(committed)


def kill_often(tmp_path: Path, times: int) -> str:
    """Kills a writer so many times; says what was found."""
    rng = random.Random(3)
    noted: set[bytes] = set()
    acknowledged = committed = seen = 0
    folder = tmp_path / "disk"
    for turn in range(times):
        if len(noted) > FOLDER_BLOCKS:  # a fresh directory before anything has to be evicted
            acknowledged, committed, seen = acknowledged + len(noted), committed + seen, 0
            noted = set()
            folder = tmp_path / f"disk{turn}"
        seen = kill_and_check(folder, turn, rng, noted)
    acknowledged, committed = acknowledged + len(noted), committed + seen
    assert acknowledged > times, "the kills came too early to say anything"
    return (
        f"{times} kills while two threads wrote: {acknowledged} blocks acknowledged, {committed} "
        "rows committed; 100 % of both found again, 0 unverifiable blocks served"
    )


def test_ten_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    kill_often(tmp_path, 10)


@pytest.mark.slow
def test_two_hundred_kills_lose_nothing_that_was_acknowledged(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    tell(kill_often(tmp_path, 200))
