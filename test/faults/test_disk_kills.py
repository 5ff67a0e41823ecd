"""The real thing: servers that share a directory and are killed at any moment, while files are
removed under them and others start and end."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from sglang_hc.store.disk import DiskStore
from sglang_hc.store.disk.sharing import living_servers
from sglang_hc.store.outcome import Outcome
from support.disk_process import PATHS, THREADS, run_child
from support.disk_store import (
    BUFFERED,
    FILE,
    block_files,
    bytes_at_a_moment,
    check_ledgers,
    file_bytes,
    is_served,
    make_path,
    open_store,
    put,
    read_bytes,
)
from support.waiting import HANGS_S, until

BUDGET = 60
"""Blocks: a quarter of what the servers write."""

SERVERS = 2


def start(folder: Path, seed: int) -> subprocess.Popen[str]:
    return run_child("serve", str(folder), str(seed), str(BUDGET * FILE))


def wait_until_it_serves(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "began\n"


def kill(child: subprocess.Popen[str]) -> None:
    """And see that nothing went wrong in it."""
    child.send_signal(signal.SIGKILL)
    said, _ = child.communicate(timeout=HANGS_S)
    assert said in ("", "began\n"), said


def being_written(folder: Path) -> list[str]:
    return [path.name for path in (folder / "sglang-hc" / "new").iterdir()]


def check_left(folder: Path, dead: str) -> int:
    """Open the directory beside the servers that live. What the dead one left in `new` is gone,
    and each block that is there is whole. Returns how many were served."""
    store = open_store(folder, size=BUDGET * FILE, backend=BUFFERED)
    assert not [name for name in being_written(folder) if name.startswith(f"{dead}-")]
    outcomes = Counter(read_bytes(store, name)[0] for name in store.block_ids())
    assert outcomes.keys() <= {Outcome.OK, Outcome.MISSING}, "missing: evicted meanwhile"
    put(store, make_path(4, seed=PATHS + 1))
    store.tick()
    assert not store.counters()["maintenance_errors"]
    store.close()
    return outcomes[Outcome.OK]


def kill_often(folder: Path, times: int, seed: int) -> str:
    """Kill one of the servers so many times; says what was found."""
    rng = random.Random(seed)
    most = served = leftovers = 0
    with ExitStack() as started:
        children = [start(folder, number) for number in range(SERVERS)]
        for child in children:
            started.callback(child.kill)
            wait_until_it_serves(child)
        until(lambda: file_bytes(folder) > 0.9 * BUDGET * FILE)
        for turn in range(times):
            end = time.monotonic() + rng.random() * 0.1
            while time.monotonic() < end:
                most = max(most, bytes_at_a_moment(folder))
            if turn % 3 == 0:
                stored = [one for one in block_files(folder) if one.parent.name != "new"]
                for path in rng.sample(sorted(stored), min(5, len(stored))):
                    path.unlink(missing_ok=True)
            which = rng.randrange(SERVERS)
            fresh = start(folder, 100 + turn)  # it takes a while to begin
            started.callback(fresh.kill)
            wait_until_it_serves(fresh)
            dead = str(children[which].pid)
            kill(children[which])
            leftovers += sum(name.startswith(f"{dead}-") for name in being_written(folder))
            children[which] = fresh
            served += check_left(folder, dead)
        for child in children:
            kill(child)
    said = int((folder / "sglang-hc" / "lock").read_text())
    assert said >= file_bytes(folder), "the ledger is never too small"
    store = open_store(folder, size=BUDGET * FILE, backend=BUFFERED)
    check_all(store, folder)
    store.close()
    # What gets its name while somebody looks may be seen twice.
    assert 0.8 * BUDGET * FILE < most <= (BUDGET + SERVERS * THREADS) * FILE and served > times
    return (
        f"{times} kills of servers that share a directory: {served} blocks read afterwards, all "
        f"whole, {leftovers} unfinished files removed, at most {most // FILE} of {BUDGET} files"
    )


def check_all(store: DiskStore, folder: Path) -> None:
    check_ledgers(store)
    assert not list((folder / "sglang-hc" / "new").iterdir())
    assert len(living_servers(store.directories[0].root)) == 1
    assert all(is_served(store, name) for name in store.block_ids())
    assert file_bytes(folder) <= BUDGET * FILE


def test_servers_are_killed_and_the_others_go_on(
    scratch: Path, tell: Callable[[str], None]
) -> None:
    tell(kill_often(scratch, 4, seed=1))


@pytest.mark.slow
def test_two_hundred_kills_of_servers(scratch: Path, tell: Callable[[str], None]) -> None:
    tell(kill_often(scratch, 200, seed=2))
