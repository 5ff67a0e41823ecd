"""A server's disk store in a process of its own, which tests kill.

python -m support.disk_process erase FOLDER clear|forget STEP
python -m support.disk_process serve FOLDER SEED BUDGET
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

from sglang_hc.store.outcome import GOOD, Outcome
from sglang_hc.tree.forgetting import Forgetting
from support.disk_store import (
    FILE,
    Faults,
    FaultyBackend,
    is_served,
    make_path,
    open_store,
    put,
    remove,
)

PATHS = 60
"""Prefixes that the servers have in common, of four blocks each."""

THREADS = 2
"""That write in each server."""

RATE = 4e6
"""Bytes per second of each: so slow that kills come in the middle of writes."""


def run_child(*words: str) -> subprocess.Popen[str]:
    """Start a process of this module; its output is read line by line."""
    folders = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.Popen(
        [sys.executable, "-m", "support.disk_process", *words],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def erase(folder: Path, what: str, step: str) -> None:
    """Erase, and be killed at the nth rename, removal or sync."""
    faults, calls = Faults(), 0

    def count(path: str) -> None:
        nonlocal calls
        if str(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1

    store = open_store(folder, size=400 * FILE, backend=FaultyBackend(faults))
    faults.on_rename = faults.on_unlink = faults.on_sync = count
    print(*store.erase(None if what == "clear" else Forgetting("acme")), flush=True)
    signal.pause()


def serve(folder: Path, seed: int, budget: int) -> None:
    """Do what servers do, on several threads, until killed. Each byte that is served is checked. A
    line is printed when it began, and one with what went wrong."""
    slow = FaultyBackend(Faults(bytes_per_second=RATE))
    store = open_store(folder, size=budget, backend=slow, background=True)

    def work(number: int) -> None:
        rng = random.Random(seed * THREADS + number)
        while True:
            blocks = make_path(4, seed=rng.randrange(PATHS))
            ids = [block.block_id for block in blocks]
            wrong = {*put(store, blocks)} - {*GOOD, Outcome.NO_SPACE}
            if wrong:
                print(wrong, flush=True)
            for block in make_path(4, seed=rng.randrange(PATHS)):
                if store.contains([block.block_id]) or store.find(block.block_id):
                    is_served(store, block)
            store.touch(ids)
            if rng.random() < 0.1:
                remove(store, ids[2:])
            if rng.random() < 0.1:
                store.directories[0].find_others()

    def work_until_wrong(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            print(repr(error), flush=True)

    store.tick()
    for number in range(THREADS):
        threading.Thread(target=work_until_wrong, args=(number,), daemon=True).start()
    print("began", flush=True)
    signal.pause()


if __name__ == "__main__":
    if sys.argv[1] == "erase":
        erase(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        serve(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
